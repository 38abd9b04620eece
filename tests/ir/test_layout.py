"""Layouts: the algebra against brute force, Hopper's maps against their formulas."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tilegrad.core.errors import InternalError, UserError
from tilegrad.ir.distribution import (
    Distribution,
    mma_accumulator,
    rows_of_vectors,
    wgmma_accumulator,
)
from tilegrad.ir.layout import (
    Layout,
    Swizzle,
    byte_swizzle,
    coalesce,
    column_major,
    complement,
    compose,
    divide,
    inverse,
    is_injective,
    join,
    product,
    row_major,
)
from tilegrad.ir.symbol import evaluate, loop_index, symbol

N = symbol("N", 1, 64)

shapes = st.recursive(
    st.integers(1, 6),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(tuple),
    max_leaves=4,
)


@st.composite
def layouts(draw, strides=(0, 1, 2, 3, 4, 6, 12, 24)):
    def fill(shape):
        if isinstance(shape, tuple):
            return tuple(fill(s) for s in shape)
        return draw(st.sampled_from(strides))

    shape = draw(shapes)
    return Layout(shape, fill(shape))


@st.composite
def dense_layouts(draw):
    """A permutation of a dense Layout: a bijection, often nested."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6]), min_size=1, max_size=3))
    order = draw(st.permutations(range(len(sizes))))
    strides, step = [0] * len(sizes), 1
    for axis in order:
        strides[axis], step = step, step * sizes[axis]
    return Layout(tuple(sizes), tuple(strides))


def table(layout):
    """Offsets by one index, the slow and obvious way."""
    return [layout(i) for i in range(layout.size)]


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_offsets_size_and_cosize(layout):
    offsets = layout.offsets()
    assert offsets.shape == tuple(m.size for m in layout.modes())
    assert offsets.ravel(order="F").tolist() == table(layout)
    assert layout.cosize == offsets.max() + 1
    for place in np.ndindex(offsets.shape):
        assert layout(*place) == offsets[place]
    assert is_injective(layout) == (len(set(table(layout))) == layout.size)


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_coalesce_is_the_same_function(layout):
    short = coalesce(layout)
    assert table(short) == table(layout)
    assert len(short.leaves()) <= len(layout.leaves())
    assert coalesce(short) == short


@settings(max_examples=300, deadline=None)
@given(layouts(), layouts(strides=(0, 1, 2, 3, 4, 6, 8)))
def test_compose_is_exact_or_refuses(outer, inner):
    try:
        both = compose(outer, inner)
    except UserError:
        assume(False)
    assert both.size == inner.size
    if isinstance(inner.shape, tuple):
        assert [m.size for m in both.modes()] == [m.size for m in inner.modes()]
    assert table(both) == [outer(inner(i)) for i in range(inner.size)]


@settings(max_examples=50, deadline=None)
@given(dense_layouts())
def test_compose_with_the_whole_and_with_the_inverse(layout):
    assert table(compose(layout, column_major(layout.size))) == table(layout)
    assert table(compose(layout, inverse(layout))) == list(range(layout.size))


@settings(max_examples=60, deadline=None)
@given(dense_layouts(), st.sampled_from([1, 2, 3]))
def test_inverse(layout, gap):
    spread = Layout(layout.shape, tuple(d * gap for d in layout.stride))
    back = inverse(spread)
    assert [back(offset) for offset in table(spread)] == list(range(spread.size))


@settings(max_examples=60, deadline=None)
@given(dense_layouts(), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]))
def test_complement_fills_what_is_left(layout, gap, more):
    spread = Layout(layout.shape, tuple(d * gap for d in layout.stride))
    total = spread.size * gap * more
    rest = complement(spread, total)
    assert sorted(table(join(spread, rest))) == list(range(total))


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 5), st.integers(1, 5)), st.tuples(st.integers(1, 4), st.integers(1, 4))
)
def test_divide_tiles_each_mode(tile, counts):
    shape = tuple(t * c for t, c in zip(tile, counts))
    for layout in (row_major(shape), column_major(shape)):
        offsets = layout.offsets()
        tiled = divide(layout, tile)
        for i, j in np.ndindex(tile):
            for p, q in np.ndindex(counts):
                expected = offsets[p * tile[0] + i, q * tile[1] + j]
                assert tiled((i, j), (p, q)) == expected


def test_divide_of_nested_modes_and_refusals():
    layout = Layout(((4, 6), 8), ((1, 32), 4))
    tiled = divide(layout, (8, 2))
    assert tiled.size == layout.size and is_injective(tiled)
    assert tiled[0].offsets()[:, 0].tolist() == [0, 1, 2, 3, 32, 33, 34, 35]
    with pytest.raises(UserError, match="tiles must fit exactly"):
        divide(row_major((7, 4)), (2, 2))
    with pytest.raises(UserError, match="one tile size per mode"):
        divide(row_major((8, 4)), 2)


@settings(max_examples=50, deadline=None)
@given(dense_layouts(), st.integers(1, 4), st.integers(1, 3))
def test_product_repeats_a_layout(layout, a, b):
    tiles = product(layout, row_major((a, b)))
    assert tiles[0] == layout
    assert sorted(table(tiles)) == list(range(layout.size * a * b))


def test_constructors():
    assert repr(row_major((4, 8))) == "(4,8):(8,1)"
    assert repr(column_major((4, (2, 8)))) == "(4,(2,8)):(1,(4,8))"
    assert repr(row_major((3, N, 5))) == "(3,N,5):((5*N),5,1)"
    assert row_major(7) == Layout(7, 1)
    with pytest.raises(UserError, match="nest alike"):
        Layout((4, 8), 1)
    with pytest.raises(UserError, match="does not fit"):
        row_major((4, 8))(1, 2, 3)


def test_known_compositions():
    """From the CuTe documentation of layout algebra."""
    assert repr(compose(Layout((6, 2), (8, 2)), Layout((4, 3), (3, 1)))) == "((2,2),3):((24,2),8)"
    assert repr(compose(Layout(20, 2), Layout((5, 4), (4, 1)))) == "(5,4):(8,2)"
    assert repr(complement(Layout((2, 2), (1, 6)), 24)) == "(3,2):(2,12)"
    assert repr(coalesce(Layout((2, (1, 6)), (1, (6, 2))))) == "12:1"
    with pytest.raises(UserError, match="goes beyond the outer"):
        compose(Layout((4, 6), (1, 10)), Layout(5, 6))
    with pytest.raises(UserError, match="no Layout"):
        compose(Layout((4, 6), (1, 10)), Layout(5, 3))


@settings(max_examples=50, deadline=None)
@given(
    layouts(),
    st.one_of(st.none(), st.builds(Swizzle, st.integers(1, 3), st.integers(0, 4), st.just(3))),
)
def test_text_reads_back(layout, swizzle):
    layout = Layout(layout.shape, layout.stride, swizzle)
    assert Layout.from_text(repr(layout)) == layout


def test_text_with_symbols():
    layout = Layout((4, (2, N)), (2 * N, (1, 2)), Swizzle(3, 4, 3))
    assert layout.to_text() == "(4,(2,N)):((2*N),(1,2)) xor<3,4,3> where N in 1..64"
    assert Layout.from_text(layout.to_text()) == layout
    assert Layout.from_text("(4,(2,8)):(16,(1,2)) xor<3,4,3>").swizzle == byte_swizzle(128)
    for bad in ("(4,2)", "(4,2):(1,2) xor<3>", "4:1 more"):
        with pytest.raises(UserError, match="cannot read a Layout"):
            Layout.from_text(bad)


def test_symbolic_sizes():
    layout = row_major((N, 8))
    i, j = loop_index("i", 64), loop_index("j", 8)
    assert layout(i, j) is 8 * i + j
    assert layout.size is 8 * N and layout.cosize is 8 * N
    assert is_injective(layout)
    assert not is_injective(Layout((N, 8), (4, 1)))
    tiled = divide(row_major((4 * N, 8)), (4, 8))
    offset = tiled((i % 4, j), (i // 4, 0))
    assert evaluate(offset, {"i": 13, "j": 5, "N": 16}) == 13 * 8 + 5
    with pytest.raises(InternalError, match="swizzle of the symbolic offset"):
        Layout((4, 8), (8, 1), Swizzle(1, 0, 1))(i, j)
    with pytest.raises(UserError, match="symbolic"):
        layout.offsets()


@pytest.mark.parametrize("width,bits", [(128, 3), (64, 2), (32, 1)])
def test_byte_swizzle(width, bits):
    """hopper.md 2.3: bits 4.. are XORed with bits 7..; period 1024, 512, 256 bytes."""
    swizzle = byte_swizzle(width)
    address = np.arange(4096)
    expected = address.copy()
    for bit in range(bits):
        expected ^= ((address >> (7 + bit)) & 1) << (4 + bit)
    assert (swizzle(address) == expected).all()
    assert (swizzle(swizzle(address)) == address).all()
    assert swizzle.period == {128: 1024, 64: 512, 32: 256}[width]
    shifted = swizzle(address + swizzle.period) - swizzle.period
    assert (shifted == expected).all()


def test_tma_tile_of_bfloat16():
    """A TMA box of 64 rows by 64 bf16: the 16-byte column is XORed with row % 8."""
    layout = Layout((64, 64), (64, 1), byte_swizzle(128).in_elements(2))
    assert repr(layout) == "(64,64):(64,1) xor<3,3,3>"
    row, column = np.indices((64, 64))
    expected = row * 128 + ((column * 2 // 16) ^ (row % 8)) * 16 + column * 2 % 16
    assert (layout.offsets() * 2 == expected).all()
    assert is_injective(layout) and layout.cosize == 64 * 64
    # 8 rows of one 16-byte column meet 8 different groups of banks
    assert len({int(o) * 2 % 128 // 16 for o in layout.offsets()[:8, 0]}) == 8


def test_swizzle_refusals():
    with pytest.raises(UserError, match="bad swizzle"):
        Swizzle(3, 4, 2)
    with pytest.raises(UserError, match="32, 64 or 128"):
        byte_swizzle(16)
    with pytest.raises(UserError, match="in elements"):
        byte_swizzle(128).in_elements(3)
    with pytest.raises(UserError, match="inner Layout is swizzled"):
        compose(Layout(8, 1), Layout(8, 1, Swizzle(1, 0, 1)))
    with pytest.raises(UserError, match="take the swizzle off"):
        inverse(Layout(8, 1, Swizzle(1, 0, 1)))


@pytest.mark.parametrize("columns", [8, 24, 64, 128, 256])
def test_wgmma_accumulator(columns):
    """hopper.md 2.4, the D fragment."""
    fragment = wgmma_accumulator(columns)
    assert (fragment.warps, fragment.lanes, fragment.registers) == (4, 32, columns // 2)
    warp, lane, i = np.indices((4, 32, columns // 2))
    row = 16 * warp + lane // 4 + 8 * ((i >> 1) & 1)
    column = 8 * (i >> 2) + 2 * (lane % 4) + (i & 1)
    assert (fragment.elements() == row * columns + column).all()
    assert fragment.is_exact
    assert fragment.coordinate(2, 13, 3) == (16 * 2 + 3 + 8, 2 * 1 + 1)
    for place in ((0, 0), (63, columns - 1), (37, 5)):
        assert fragment.coordinate(*fragment.owner(*place)) == place
    assert set(fragment.vectors()) == {(r, 2) for r in range(0, columns // 2, 2)}
    assert Distribution.from_text(fragment.to_text()) == fragment


def test_mma_accumulator():
    fragment = mma_accumulator(64, 48, (2, 2))
    assert fragment.is_exact and fragment.registers == 64 * 48 // 128
    # one m16n8 block: c0,c1 at (lane/4, 2*(lane%4)), c2,c3 eight rows below
    assert [fragment.coordinate(0, 9, r) for r in range(4)] == [(2, 2), (2, 3), (10, 2), (10, 3)]
    assert fragment.coordinate(1, 0, 0) == (0, 24)
    assert fragment.coordinate(2, 0, 0) == (32, 0)
    with pytest.raises(UserError, match="does not fit"):
        mma_accumulator(24, 48, (2, 2))


def test_rows_of_vectors():
    held = rows_of_vectors(16, 96, warps=4, vector=4)
    assert held.is_exact and list(held.vectors()) == [(0, 4), (4, 4), (8, 4)]
    assert held.coordinate(0, 1, 0) == (0, 4)
    with pytest.raises(UserError, match="does not fit the threads"):
        rows_of_vectors(3, 96, warps=4, vector=4)


def test_a_replicated_distribution_has_no_single_owner():
    held = Distribution((8,), Layout((2, 4, 8), (0, 0, 1)))
    assert not held.is_exact
    with pytest.raises(UserError, match="several"):
        held.owner(3)
    with pytest.raises(UserError, match="bad Distribution"):
        Distribution((4,), Layout((2, 4, 8), (0, 0, 1)))
