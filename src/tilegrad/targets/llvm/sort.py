"""The tile op `sort`: one native function per key dtype and direction, in the language of `native`.

A stable bottom-up merge sort: insertion sort of runs of RUN keys, then merges of neighbouring
runs between the two pairs of arrays, each place moving with its key. Invariant: a key goes
before an earlier one only if it is strictly smaller (larger, if descending), where nan is the
largest and -0.0 equals 0.0; so equal keys keep their order.
"""

from __future__ import annotations

from ...core.dtype import DType
from .native import Module, Value
from .rules import memory_type

RUN = 12
MEMCPY = "llvm.memcpy.p0.p0.i64"

SOURCE = """
def NAME(keys: ptr, places: ptr, other_keys: ptr, other_places: ptr, count: i64):
    n = 0
    while n < count:
        key = KEY[keys, n]
        place = i64[places, n]
        first = n - n % RUN
        at = n
        sinks = at > first
        while sinks:
            left = KEY[keys, at - 1]
            sinks = SINKS
            if sinks:
                KEY[keys, at] = left
                i64[places, at] = i64[places, at - 1]
                at = at - 1
                sinks = at > first
        KEY[keys, at] = key
        i64[places, at] = place
        n = n + 1
    home = keys
    home_places = places
    width = RUN
    while width < count:
        low = 0
        while low < count:
            i = low
            j = low + width if low + width < count else count
            k = low
            middle = j
            low = low + width + width
            high = low if low < count else count
            while i < middle and j < high:
                left = KEY[keys, i]
                right = KEY[keys, j]
                take = TAKES
                KEY[other_keys, k] = right if take else left
                i64[other_places, k] = i64[places, j if take else i]
                j = j + i64(take)
                i = i + 1 - i64(take)
                k = k + 1
            memcpy(other_keys + k * SIZE, keys + i * SIZE, (middle - i) * SIZE)
            memcpy(other_places + k * 8, places + i * 8, (middle - i) * 8)
            k = k + middle - i
            memcpy(other_keys + k * SIZE, keys + j * SIZE, (high - j) * SIZE)
            memcpy(other_places + k * 8, places + j * 8, (high - j) * 8)
        before = keys
        keys = other_keys
        other_keys = before
        before = places
        places = other_places
        other_places = before
        width = width + width
    if keys != home:
        memcpy(home, keys, count * SIZE)
        memcpy(home_places, places, count * 8)
"""


def sort_function(dtype: DType, descending: bool) -> tuple[str, str]:
    """(name, text) of the helper that sorts `count` keys with their places."""
    name = f"sort_{dtype.name}_{'down' if descending else 'up'}"
    names = {"RUN": Value("", str(RUN)), "SIZE": Value("", str(dtype.size))}
    far = "gt" if descending else "lt"
    sign = "u" if dtype.is_float or dtype.kind == "uint" else "s"
    compared = {
        "beyond": f"{'fcmp' if dtype.is_float else 'icmp'} {sign}{far} {{}}, {{}}",
        "ordered": "fcmp ord {}, {}",
        "memcpy": f"call void @{MEMCPY}({{}}, ptr {{}}, i64 {{}}, i1 false)",
    }
    source = SOURCE.replace("NAME", name).replace("KEY", memory_type(dtype))
    source = source.replace("SINKS", _precedes(dtype, descending, "key", "left"))
    source = source.replace("TAKES", _precedes(dtype, descending, "right", "left"))
    return name, Module({}, names, compared).text(source)


def _precedes(dtype: DType, descending: bool, b: str, a: str) -> str:
    """Whether key b must go before an earlier key a; a nan goes after, or stays where it is."""
    number = a if descending else b
    return f"beyond({b}, {a})" + (f" and ordered({number}, {number})" if dtype.is_float else "")
