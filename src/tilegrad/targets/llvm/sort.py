"""The tile op `sort` as LLVM text: one helper function per key dtype and direction.

A stable bottom-up merge sort: insertion sort of runs of RUN keys, then merges of neighbouring
runs between the two pairs of arrays, each place moving with its key. Invariant: a key goes
before an earlier one only if it is strictly smaller (larger, if descending), where nan is the
largest and -0.0 equals 0.0; so equal keys keep their order. `_insertion` and `_merges` are long
because each is the text of one loop nest.
"""

from __future__ import annotations

from ...core.dtype import DType
from .rules import memory_type

RUN = 12


def _precedes(dtype: DType, descending: bool, element: str, b: str, a: str, name: str) -> str:
    """Lines that set %name to whether key b must go before an earlier key a."""
    if not dtype.is_float:
        sign = "s" if dtype.kind == "int" else "u"
        return f"  %{name} = icmp {sign}{'gt' if descending else 'lt'} {element} {b}, {a}"
    number = a if descending else b  # a nan there goes after, or stays where it is
    return "\n".join(
        [
            f"  %{name}.far = fcmp {'ugt' if descending else 'ult'} {element} {b}, {a}",
            f"  %{name}.number = fcmp ord {element} {number}, {number}",
            f"  %{name} = and i1 %{name}.far, %{name}.number",
        ]
    )


def sort_function(dtype: DType, descending: bool) -> tuple[str, str]:
    """(name, text) of the helper that sorts `count` keys with their places."""
    element = memory_type(dtype)
    name = f"sort_{dtype.name}_{'down' if descending else 'up'}"
    parts = [
        _insertion(element, _precedes(dtype, descending, element, "%key", "%left", "before")),
        _merges(element, _precedes(dtype, descending, element, "%right.key", "%left.key", "take")),
    ]
    head = (
        f"define internal void @{name}(ptr noalias %keys, ptr noalias %places, "
        "ptr noalias %other.keys, ptr noalias %other.places, i64 %count) #0 {"
    )
    return name, "\n".join([head, *parts, "}"])


def _insertion(element: str, precedes: str) -> str:
    """Sort every run of RUN keys in place."""
    return f"""entry:
  br label %insert
insert:                                              ; for n in 0..count: sink key n
  %n = phi i64 [ 0, %entry ], [ %n.next, %sunk ]
  %n.more = icmp slt i64 %n, %count
  br i1 %n.more, label %lift, label %merge.start
lift:
  %n.key = getelementptr {element}, ptr %keys, i64 %n
  %key = load {element}, ptr %n.key
  %n.place = getelementptr i64, ptr %places, i64 %n
  %place = load i64, ptr %n.place
  %n.within = urem i64 %n, {RUN}
  %first = sub i64 %n, %n.within
  br label %sink
sink:
  %at = phi i64 [ %n, %lift ], [ %below, %shift ]
  %at.more = icmp sgt i64 %at, %first
  br i1 %at.more, label %look, label %sunk
look:
  %below = sub i64 %at, 1
  %below.key = getelementptr {element}, ptr %keys, i64 %below
  %left = load {element}, ptr %below.key
{precedes}
  br i1 %before, label %shift, label %sunk
shift:
  %at.key = getelementptr {element}, ptr %keys, i64 %at
  store {element} %left, ptr %at.key
  %below.place = getelementptr i64, ptr %places, i64 %below
  %left.place = load i64, ptr %below.place
  %at.place = getelementptr i64, ptr %places, i64 %at
  store i64 %left.place, ptr %at.place
  br label %sink
sunk:
  %to = phi i64 [ %at, %sink ], [ %at, %look ]
  %to.key = getelementptr {element}, ptr %keys, i64 %to
  store {element} %key, ptr %to.key
  %to.place = getelementptr i64, ptr %places, i64 %to
  store i64 %place, ptr %to.place
  %n.next = add i64 %n, 1
  br label %insert"""


def _move(element: str, name: str, source: str, target: str) -> str:
    """Lines that copy key and place number `source` of `from` to number `target` of `to`."""
    return f"""  %{name}.k = getelementptr {element}, ptr %from.keys, i64 {source}
  %{name}.kv = load {element}, ptr %{name}.k
  %{name}.kt = getelementptr {element}, ptr %to.keys, i64 {target}
  store {element} %{name}.kv, ptr %{name}.kt
  %{name}.p = getelementptr i64, ptr %from.places, i64 {source}
  %{name}.pv = load i64, ptr %{name}.p
  %{name}.pt = getelementptr i64, ptr %to.places, i64 {target}
  store i64 %{name}.pv, ptr %{name}.pt"""


def _merges(element: str, precedes: str) -> str:
    """Merge runs of width RUN, 2 RUN, ... from one pair of arrays to the other and back."""
    return f"""merge.start:
  br label %pass
pass:                                                ; one width
  %width = phi i64 [ {RUN}, %merge.start ], [ %width.next, %pass.done ]
  %from.keys = phi ptr [ %keys, %merge.start ], [ %to.keys, %pass.done ]
  %from.places = phi ptr [ %places, %merge.start ], [ %to.places, %pass.done ]
  %to.keys = phi ptr [ %other.keys, %merge.start ], [ %from.keys, %pass.done ]
  %to.places = phi ptr [ %other.places, %merge.start ], [ %from.places, %pass.done ]
  %width.next = shl i64 %width, 1
  %pass.more = icmp slt i64 %width, %count
  br i1 %pass.more, label %pair, label %finish
pair:                                                ; two runs: [low, middle) and [middle, high)
  %low = phi i64 [ 0, %pass ], [ %low.next, %pair.done ]
  %low.more = icmp slt i64 %low, %count
  br i1 %low.more, label %bounds, label %pass.done
bounds:
  %middle.end = add i64 %low, %width
  %middle = call i64 @llvm.smin.i64(i64 %middle.end, i64 %count)
  %low.next = add i64 %low, %width.next
  %high = call i64 @llvm.smin.i64(i64 %low.next, i64 %count)
  br label %both
both:                                                ; while both runs have keys
  %i = phi i64 [ %low, %bounds ], [ %i.next, %step ]
  %j = phi i64 [ %middle, %bounds ], [ %j.next, %step ]
  %k = phi i64 [ %low, %bounds ], [ %k.next, %step ]
  %i.more = icmp slt i64 %i, %middle
  %j.more = icmp slt i64 %j, %high
  %both.more = and i1 %i.more, %j.more
  br i1 %both.more, label %step, label %tail.i
step:
  %i.key = getelementptr {element}, ptr %from.keys, i64 %i
  %left.key = load {element}, ptr %i.key
  %j.key = getelementptr {element}, ptr %from.keys, i64 %j
  %right.key = load {element}, ptr %j.key
{precedes}
  %chosen = select i1 %take, i64 %j, i64 %i
  %key.chosen = select i1 %take, {element} %right.key, {element} %left.key
  %key.to = getelementptr {element}, ptr %to.keys, i64 %k
  store {element} %key.chosen, ptr %key.to
  %place.from = getelementptr i64, ptr %from.places, i64 %chosen
  %place.chosen = load i64, ptr %place.from
  %place.to = getelementptr i64, ptr %to.places, i64 %k
  store i64 %place.chosen, ptr %place.to
  %take.wide = zext i1 %take to i64
  %j.next = add i64 %j, %take.wide
  %left.wide = xor i64 %take.wide, 1
  %i.next = add i64 %i, %left.wide
  %k.next = add i64 %k, 1
  br label %both
tail.i:
  %ti = phi i64 [ %i, %both ], [ %ti.next, %move.i ]
  %tk = phi i64 [ %k, %both ], [ %tk.next, %move.i ]
  %ti.more = icmp slt i64 %ti, %middle
  br i1 %ti.more, label %move.i, label %tail.j
move.i:
{_move(element, "a", "%ti", "%tk")}
  %ti.next = add i64 %ti, 1
  %tk.next = add i64 %tk, 1
  br label %tail.i
tail.j:
  %tj = phi i64 [ %j, %tail.i ], [ %tj.next, %move.j ]
  %tl = phi i64 [ %tk, %tail.i ], [ %tl.next, %move.j ]
  %tj.more = icmp slt i64 %tj, %high
  br i1 %tj.more, label %move.j, label %pair.done
move.j:
{_move(element, "b", "%tj", "%tl")}
  %tj.next = add i64 %tj, 1
  %tl.next = add i64 %tl, 1
  br label %tail.j
pair.done:
  br label %pair
pass.done:
  br label %pass
finish:                                              ; the sorted pair is `from`
  %home = icmp eq ptr %from.keys, %keys
  %stay = icmp sle i64 %count, 0
  %ready = or i1 %home, %stay
  br i1 %ready, label %exit, label %back
back:
  %x = phi i64 [ 0, %finish ], [ %x.next, %back ]
{_move(element, "c", "%x", "%x")}
  %x.next = add i64 %x, 1
  %x.more = icmp slt i64 %x.next, %count
  br i1 %x.more, label %back, label %exit
exit:
  ret void"""
