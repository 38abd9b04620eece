"""The text of an IR: prints, parses, and prints the same again."""

import json
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_dialect import (
    VECTOR,
    add,
    allocate,
    branch,
    constant,
    expand,
    fact,
    get,
    load,
    loop,
    negate,
    pair,
    sine,
    store,
    wait,
)
from toy_dialect import given as given_op

from tilegrad.core.dtype import ALL, bfloat16, bool_, float32
from tilegrad.core.errors import InternalError, Location, UserError
from tilegrad.ir.block import Block, argument, argument_op, pure_block
from tilegrad.ir.distribution import wgmma_accumulator
from tilegrad.ir.fingerprint import UserLine
from tilegrad.ir.layout import Layout, Swizzle
from tilegrad.ir.literal import Names, Reader, write
from tilegrad.ir.node import exact
from tilegrad.ir.symbol import loop_index, maximum, minimum, symbol
from tilegrad.ir.text import ATTRIBUTE_PARSERS, parse_block, print_block, print_node
from tilegrad.ir.types import NOTHING, Array, Barrier, Memory, Tile, Tuple
from tilegrad.ir.verify import verify

N = symbol("N", 1, 1024)
I = loop_index("i", 8)  # noqa: E741
A, B = argument("a", VECTOR), argument("b", Array((), float32))


def same(first, second, known):
    """Whether two Blocks have the same structure; `known` maps values of one to the other."""
    assert first.name == second.name
    assert len(first.nodes) == len(second.nodes)
    for a, b in zip(first.arguments, second.arguments, strict=True):
        assert (a.type, a.attrs["name"]) == (b.type, b.attrs["name"])
        known[a] = b
    for a, b in zip(first.nodes, second.nodes):
        assert a.op is b.op and a.type == b.type
        assert [known[s] for s in a.inputs] == list(b.inputs)
        assert exact(tuple(a.attrs.items())) == exact(tuple(b.attrs.items()))
        for inner, other in zip(a.blocks, b.blocks, strict=True):
            same(inner, other, known)
        known[a] = b
    assert [known[r] for r in first.results] == list(second.results)


def round_trip(block, **options):
    text = print_block(block, "toy", **options)
    parsed = parse_block(text)
    same(block, parsed, {})
    assert print_block(parsed, "toy", **options) == text
    return text


def test_example():
    wide = expand(B, shape=(4,))
    total = add(A, wide)
    text = round_trip(pure_block("main", (A, B), (total,)))
    assert text == (
        "tilegrad-ir 1 toy\n"
        "main(%a: float32[4], %b: float32[]) {\n"
        "  %0 = expand(%b) {shape=(4,)} : float32[4]\n"
        "  %1 = add(%a, %0) : float32[4]\n"
        "  return %1\n"
        "}\n"
    )


def test_symbols_are_declared_with_bounds_and_kind():
    a = argument("a", Array((N, (N + 1) // 2), float32))
    made = expand(a, shape=(N * 4, minimum(N, 7) + I))
    text = round_trip(pure_block("main", (a,), (made,)))
    assert "symbols N in 1..1024, i loop in 0..7\n" in text
    assert "float32[N,((N + 1) // 2)]" in text
    assert "shape=((4*N), (i + min(N, 7)))" in text


def test_symbols_of_one_name_are_told_apart():
    other, odd, reserved = symbol("N", 2, 9), symbol("batch size", 1, 4), symbol("float32", 1, 3)
    shape = (N, other, loop_index("N", 5), odd, reserved)
    text = round_trip(pure_block("main", (B,), (expand(B, shape=shape),)))
    assert 'N_1 "N" in 2..9, N_2 "N" loop in 0..4, batch_size "batch size" in 1..4' in text


def test_nested_blocks_see_outer_values_and_may_shadow():
    inner_a = argument("a", VECTOR)  # the same name as an outer argument
    outside = negate(A)
    step = add(inner_a, outside)
    body = Block("body", (inner_a,), [step], (step,))
    looped = loop(A, count=3, blocks=(body,))
    flag = argument("flag", Array((), bool_))
    yes = Block("yes", (), [wait()], ())
    no = Block("no", (), [], ())
    block = Block("main", (A, flag), [outside, looped, branch(flag, blocks=(yes, no))], (looped,))
    text = round_trip(block)
    assert text == (
        "tilegrad-ir 1 toy\n"
        "main(%a: float32[4], %flag: bool[]) {\n"
        "  %0 = negate(%a) : float32[4]\n"
        "  %1 = loop(%a) {count=3} : float32[4] {\n"
        '    body(%a_1 "a": float32[4]) {\n'
        "      %2 = add(%a_1, %0) : float32[4]\n"
        "      return %2\n"
        "    }\n"
        "  }\n"
        "  branch(%flag) {\n"
        "    yes() {\n"
        "      wait()\n"
        "      return\n"
        "    }\n"
        "    no() {\n"
        "      return\n"
        "    }\n"
        "  }\n"
        "  return %1\n"
        "}\n"
    )
    verify(parse_block(text), "toy")


def test_effects_places_and_values_of_nothing():
    place = allocate(shape=(16, 32), dtype=float32, scope="shared")
    loaded = load(place, shape=(16, 32))
    stored = store(place, loaded)
    waited = wait(stored)
    text = round_trip(Block("body", (), [place, loaded, stored, waited], (waited,)))
    assert '%0 = allocate() {shape=(16, 32), dtype=float32, scope="shared"} : ' in text
    assert " : tile<16,32>float32\n" in text
    assert "%2 = store(%0, %1) : nothing\n" in text
    bare = Block("body", (), [place, store(place, loaded)], ())
    assert "\n  store(" in print_block(bare, "toy")


def test_a_node_in_two_blocks_prints_in_both():
    shared = negate(A)
    looped = loop(A, count=3, blocks=(Block("body", (), [shared], (shared,)),))
    round_trip(Block("main", (A,), [shared, looped, add(shared, looped)], (shared,)))


def test_other_dialects_given_types_and_tuples():
    both = pair(sine(A), B)
    typed = given_op.make((A,), {"tag": "x"}, type=Tile((2,), float32))
    loose = argument_op.make((), {"name": "loose", "serial": 7}, type=VECTOR)
    nodes = [both.inputs[0], both, get(both, index=0), typed, loose]
    text = round_trip(Block("main", (A, B), nodes, (nodes[2],)))
    assert "toy_other.sine(%a)" in text
    assert ": tuple(float32[4], float32[])" in text
    assert "common.argument()" in text


def test_locations():
    made = negate.make((argument("p", VECTOR),), {}, location=Location("my model.py", 12))
    second = negate.make((made,), {}, location=Location("/home/me/model-1.py", 3))
    block = Block("main", made.inputs, [made, second], (second,))
    text = round_trip(block, locations=True)
    assert '  @ "my model.py":12\n' in text and "  @ /home/me/model-1.py:3\n" in text
    parsed = parse_block(text)
    assert [repr(n.location) for n in parsed.nodes] == ["my model.py:12", "/home/me/model-1.py:3"]
    assert "@" not in print_block(block, "toy")
    bare = parse_block(print_block(block, "toy"))
    assert bare.nodes[0].location.line == 3  # the line of the text


TYPES = [
    VECTOR,
    Array((), bool_),
    Array((N, 3 * N + 2), bfloat16),
    Tile((16, 32), float32),
    Tile((), float32),
    Memory((4, N), float32),
    Memory((4, 8), float32, "shared", "state", (8, 1), "xor<3,4,3>"),
    Memory((4,), bfloat16, "global", "constant", None, "packed"),
    Barrier(4),
    Barrier(128, "named"),
    Tuple((VECTOR, Tuple(()), NOTHING)),
    NOTHING,
]


@pytest.mark.parametrize("type_", TYPES, ids=repr)
def test_types_as_types_and_as_attrs(type_):
    a = argument("a", type_)
    noted = fact(fact=(type_, (type_,)))
    round_trip(Block("main", (a,), [noted], (noted,)))


FACTS = [
    0.0, -0.0, math.inf, -math.inf, math.nan, 1e-300, 1e22, 0.1, -3, True, False, None, (), (1,),
    (1, (2.0, (True,), None)), "plain", 'quo"te\\ \n ☃ } { @ %0 #', float32, ((float32,), bool_),
    N, N + 1, (N,), (N * I - 3, maximum(N, I)), ("a", 1, N), 1 << 80, Layout((4, 8), (8, 1)),
    Layout((4, (2, N)), (2 * N, (1, 2)), Swizzle(3, 4, 3)), wgmma_accumulator(64),
]  # fmt: skip


@pytest.mark.parametrize("value", FACTS, ids=repr)
def test_attr_values(value):
    round_trip(pure_block("main", (), (fact(fact=value),)))


values = st.recursive(
    st.one_of(
        st.integers(),
        st.floats(),
        st.booleans(),
        st.none(),
        st.text(),
        st.sampled_from(ALL),
        st.sampled_from([N, I, N * I + 2, (N + 5) // 3 % 7, minimum(N, 9)]),
        st.sampled_from(TYPES),
    ),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(values)
def test_any_literal_reads_back(value):
    names = Names()
    text = write(value, names)
    assert "\n" not in text
    reader = Reader(text)
    if names.of:
        header = Reader(names.declarations())
        header.declarations()
        reader.symbols = header.symbols
    assert exact(reader.value()) == exact(value)
    assert reader.kind == "end"


def test_registered_objects():
    class Recipe:
        text_name = "recipe"

        def __init__(self, steps):
            self.steps = steps

        def to_text(self):
            return json.dumps(self.steps)

        def __eq__(self, other):
            return self.steps == other.steps

        def __hash__(self):
            return hash(tuple(self.steps))

    node = fact(fact=Recipe(["a", 'b"']))
    block = pure_block("main", (), (node,))
    with pytest.raises(InternalError, match="ATTRIBUTE_PARSERS"):
        print_block(block, "toy")
    assert "recipe" in print_node(node)
    ATTRIBUTE_PARSERS["recipe"] = lambda text: Recipe(json.loads(text))
    try:
        round_trip(block)
    finally:
        del ATTRIBUTE_PARSERS["recipe"]


def test_a_line_of_the_user_has_a_text():
    round_trip(pure_block("main", (), (fact(fact=UserLine("a file.py:3")),)))


def test_hand_written_text_may_have_comments_and_leave_types_out():
    block = parse_block(
        """
        tilegrad-ir 1 toy   # a comment
        symbols N in 1..1024

        main(%x: float32[N - 1]) {
          # negate it twice
          %y = negate(%x)
          %z = negate(%y) : float32[N + -1]  # typed
          return %z, %x
        }
        """
    )
    assert [n.op for n in block.nodes] == [negate, negate]
    assert block.results[0].shape == (N - 1,)


HEAD = "tilegrad-ir 1 toy\nmain(%a: float32[4]) {\n"
MISTAKES = [
    ("graph 1", "line 1", "the first line 'tilegrad-ir 1 <dialect>'", "'graph'"),
    ("tilegrad-ir 1 no_such\n", "line 1", "one of the dialects", "'no_such'"),
    ("tilegrad-ir 1 toy\nmain(a) {", "line 2", "an argument", "'a'"),
    ("tilegrad-ir 1 toy\nsymbols N in 1\n", "line 2", "'..'", "the end of the line"),
    (HEAD + "  %0 = negat(%a)\n", "line 3", "an op of the dialect toy", "'negat'"),
    (HEAD + "  %0 = no.negate(%a)\n", "line 3", "one of the dialects", "'no'"),
    (HEAD + "  %0 = negate(%b)\n", "line 3", "a value defined before", "%b"),
    (HEAD + "  %0 = negate(%a) : float32[5]\n", "line 3", "the type float32[4]", "float32[5]"),
    (HEAD + "  %0 = expand(%a)\n", "line 3", "the attrs shape", "the end of the line"),
    (HEAD + "  %0 = expand(%a) {size=3}\n", "line 3", "an attr of expand: shape", "'size'"),
    (HEAD + "  %0 = expand(%a) {shape=(M,)}\n", "line 3", "a value", "'M'"),
    (HEAD + "  %0 = expand(%a) {shape=(4}\n", "line 3", "')' or ','", "'}'"),
    (HEAD + "  %0 = fact() {fact=1.5 + 2}\n", "line 3", "an integer or a Symbol", "1.5"),
    (HEAD + '  %0 = fact() {fact=odd"x"}\n', "line 3", "one of ", "odd"),
    (HEAD + "  %0 = negate(%a) : float31[4]\n", "line 3", "a dtype", "'float31'"),
    (HEAD + "  %0 = negate(%a) ; 3\n", "line 3", "the end of the line", "';'"),
    (HEAD + "  %0 negate(%a)\n", "line 3", "'=' after %0", "'negate'"),
    (HEAD + "  %0 = add(%a)\n", "line 3", "inputs and attrs that fit add", "missing 1"),
    (HEAD + "  return %a\n", "line 4", "'}' after return", "the end of the text"),
    (HEAD + "  return %a\n}\nmore", "line 5", "the end of the text", "'more'"),
    (HEAD, "line 3", "an op or 'return'", "the end of the text"),
]


@pytest.mark.parametrize("text,line,expected,got", MISTAKES)
def test_mistakes_are_located_and_explained(text, line, expected, got):
    with pytest.raises(UserError) as caught:
        parse_block(text)
    message = str(caught.value)
    assert f"cannot read IR text, {line}\n" in message
    assert "expected: " + expected in message
    assert "got: " in message and got in message.split("got: ")[1]


def test_near_misses_are_suggested_and_versions_checked():
    with pytest.raises(UserError, match="did you mean negate"):
        parse_block(HEAD + "  %0 = negat(%a)\n")
    with pytest.raises(UserError, match="version 2") as caught:
        parse_block("tilegrad-ir 2 toy\n")
    assert "expected: version 1" in str(caught.value)


def test_print_node():
    node = add(A, negate(A))
    serial = node.inputs[1].serial
    assert print_node(node).startswith(f"%0 = add(%a, %negate.{serial}) : float32[4]  @ ")


def test_a_chain_of_ten_thousand():
    chain = argument("a", VECTOR)
    block = pure_block("main", (chain,), (_chain(chain, 10_000),))
    text = print_block(block, "toy")
    parsed = parse_block(text)
    assert len(parsed.nodes) == 10_000
    assert print_block(parsed, "toy") == text


def _chain(node, length):
    for _ in range(length):
        node = negate(node)
    return node


def test_text_is_the_same_in_another_process():
    early, late = symbol("early", 1, 50), symbol("a_late", 1, 50)
    shape = (late // 3, early // 4 + late // 3, minimum(late, early) * early)
    text = print_block(pure_block("main", (B,), (expand(B, shape=shape),)), "toy")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import toy_dialect\n"
        "from tilegrad.ir.text import parse_block, print_block\n"
        "sys.stdout.write(print_block(parse_block(sys.stdin.read()), 'toy'))"
    )
    folder = __file__.rpartition("/")[0]
    run = subprocess.run(
        [sys.executable, "-c", program, folder], input=text, capture_output=True, text=True
    )
    assert run.stdout == text, run.stderr
    assert constant(value=2.0, dtype=float32) is not None
