"""copy_pages: pages whose numbers are data, from the tile language to simulated PTX."""

from __future__ import annotations

import numpy as np
import pytest
from placed_builder import PlacedBuilder
from simulator import simulate

import tilegrad as tg
from tilegrad import kernel, tile
from tilegrad.core.dtype import bfloat16, float32, int64
from tilegrad.core.errors import InternalError
from tilegrad.core.target import H200
from tilegrad.ir.types import Memory
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile.check import verify_body
from tilegrad.tile.interpret import run
from tilegrad.tile.prove import check_body
from tilegrad.tile.text import body_text, parse_body

PAGE, COUNT, WIDTH = 8, 4, 64


@kernel
def collect(cache, table, *, layout: str = "", bytes_: int = 0, hint: str = ""):
    """The pages that each row of a table names, head by head, one below the other."""
    rows, (_, _, heads, _) = table.shape[0], cache.shape
    i, h = tile.grid(rows, heads)
    out = tile.result((rows, heads, COUNT * PAGE, WIDTH), cache.dtype)
    place = tile.shared((COUNT * PAGE, WIDTH), cache.dtype, layout)
    full = tile.barrier("full", 1)
    with tile.role("producer", warps=1):
        pages = tile.load(table, (i, 0), (COUNT,), axes=(1,))
        full.expect(0, bytes_ or COUNT * PAGE * WIDTH * cache.dtype.size)
        tile.copy_pages(place, cache[0, :, h, :], pages, full[0], hint)
    with tile.role("consumer", warps=4):
        full.wait(0, 0)
        tile.store(out, (i, h, 0, 0), tile.read(place))


def memories():
    """A cache, a table with pages that do not exist, and what is collected."""
    draw = np.random.default_rng(0)
    cache = draw.standard_normal((6, PAGE, 2, WIDTH)).astype(bfloat16.numpy)
    table = np.array([[3, 0, 5, 3], [1, 6, 2, -1], [4, 1000000, 0, 1]], np.int32)
    wanted = np.zeros((3, 2, COUNT * PAGE, WIDTH), bfloat16.numpy)
    for row, pages in enumerate(table):
        for number, page in enumerate(pages):
            if 0 <= page < len(cache):
                part = cache[page].swapaxes(0, 1)
                wanted[row, :, number * PAGE : (number + 1) * PAGE] = part
    return cache, table, wanted


@pytest.mark.parametrize("layout", ("", "swizzle128"))
@pytest.mark.parametrize("hint", ("", "first"))
def test_pages_are_collected(layout, hint):
    cache, table, wanted = memories()
    (body,) = collect.lower(tg.tensor(cache), tg.tensor(table), layout=layout, hint=hint)
    verify_body(body, "placed", H200)
    assert not [f for f in check_body(body, H200) if f.severity == "error"]
    assert body_text(parse_body(body_text(body))) == body_text(body)
    for seed in (None, 1):
        out = np.ones_like(wanted)
        run(body, [cache, table, out], seed=seed)
        np.testing.assert_array_equal(out, wanted)
    out = np.ones_like(wanted)
    text, entry = emit(body, "collect", H200)
    assert text.count("cp.async.bulk.tensor.4d") == 1
    assert (".L2::cache_hint" in text) == bool(hint)
    simulate(text, entry, [cache, table, out])
    np.testing.assert_array_equal(out, wanted)


def test_bytes_that_are_not_all_expected():
    cache, table, _ = memories()
    with pytest.raises(tg.UserError, match="full"):
        collect.lower(tg.tensor(cache), tg.tensor(table), bytes_=PAGE * WIDTH * 2)


@pytest.mark.parametrize(
    "count, shape, hint, why",
    [
        (3, (8, 64), "", "are not the pages of 4 boxes"),
        (4, (8, 32), "", "does not fit the place"),
        (4, (8, 64), "last", "no hint is called"),
    ],
)
def test_what_does_not_fit(count, shape, hint, why):
    b = PlacedBuilder("odd", [("cache", Memory((6, 8, 64), float32))])
    place = b.allocate((32, 64), float32, "shared")
    full = b.barrier("full", 1)
    pages = b.constant(0, int64, (count,))
    with pytest.raises(InternalError, match=why):
        b.copy_pages(place, (), b.parameters[0], pages, (0, 0, 0), shape, (1, 2), full, 0, hint)
