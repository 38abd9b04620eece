"""The table of Families: what it names exists, every kind of Region has one for every Target, one
from outside wins a Region by its seconds, is named by `explain` and enters the compile key."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.compiler.breaks import breaks_of
from tilegrad.compiler.compile import compile_for, host, schedule_for
from tilegrad.core.config import override
from tilegrad.core.errors import InternalError, UserError
from tilegrad.core.target import A100, H200, STATIC, Target
from tilegrad.graph import build, ops
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import symbol
from tilegrad.ir.types import Memory, product
from tilegrad.runtime.buffer import Buffer
from tilegrad.schedule import families
from tilegrad.schedule.families import KINDS, TABLE, Row, family_of, rows_of
from tilegrad.schedule.family import Bodies, Family, Offer, roofline, select
from tilegrad.schedule.region import Region
from tilegrad.tile.build import BodyBuilder


class Halving(Family):
    """Adds a value to itself, an element a program: it knows sums x + x of float32 alone."""

    def offers(self, region: Region) -> Sequence[Offer] | str:
        node = region.anchor
        if len(region.values) > 1 or node.inputs[0] is not node.inputs[1]:
            return "only x + x"
        return [Offer(roofline(region) / 2, "doubled", "a claim")]

    def lower(self, region: Region, offer: Offer) -> Bodies:
        assert offer.plan == "doubled"
        node = region.anchor
        size, dtype = product(node.shape), node.dtype
        given = [("x", Memory((size,), dtype)), ("y", Memory((size,), dtype, use="result"))]
        b = BodyBuilder(region.name, given)
        at = b.program(0, size)
        x = b.load(b.parameters[0], (at,))
        b.store(b.parameters[1], b.apply("multiply", x, b.constant(2.0, dtype)), (at,))
        return [(b.finish((size,)), [("read", 0), ("store", 0)])]


@pytest.fixture
def halving() -> Iterator[Row]:
    row = Row("halving", ("add",), Halving())
    families.register(row)
    yield row
    families.remove("halving")


def doubled(x: tg.Tensor) -> tg.Tensor:
    return x + x


def test_every_row_is_a_family_with_a_docstring() -> None:
    names = [row.name for row in TABLE]
    assert len(set(names)) == len(names)
    for row in TABLE:
        family = family_of(row)
        assert isinstance(family, Family) and type(family).__doc__ and family.name == row.name
        assert all(op in ops.graph.ops for op in row.anchors if op != "*"), row


@pytest.mark.parametrize("target", STATIC.values(), ids=lambda t: t.name)
def test_every_kind_has_a_family_for_every_target(target: Target) -> None:
    for op, kind in [*KINDS.items(), ("add", "loops"), ("sum", "mixed")]:
        if kind != "control":
            assert rows_of(kind, op, target), (kind, target.name)


def test_one_from_outside_wins_and_is_named(halving: Row) -> None:
    x = tg.zeros((33,))
    text = tg.explain(doubled, x).section("families")
    assert "halving, the least seconds" in text and "(a claim)" in text
    assert "loops on vectors offers" in text
    text = tg.explain(lambda x: x + 1, x).section("families")
    assert "loops on vectors, the only offer" in text and "halving refuses: only x + x" in text


def test_what_it_makes_runs(halving: Row) -> None:
    x = build.input_((33,), tg.float32)
    values = np.arange(33, dtype=np.float32)
    made = compile_for([x], [build.add(x, x)], host())
    (got,) = made.run([Buffer.wrap(values)])
    np.testing.assert_array_equal(got.array((33,), tg.float32), 2 * values)
    (kernel,) = schedule_for([x], [build.add(x, x)], host()).kernels
    assert kernel.notes["verdict"].winner == "halving"


def test_it_enters_the_compile_key() -> None:
    values = np.arange(5, dtype=np.float32)
    before = families.outside()
    x = tg.tensor(values)
    np.testing.assert_array_equal((x + x).numpy(), 2 * values)

    class Wrong(Halving):
        """Says 3 x."""

        def lower(self, region: Region, offer: Offer) -> Bodies:
            ((_, roles),) = super().lower(region, offer)
            node = region.anchor
            given = [("x", Memory((5,), node.dtype)), ("y", Memory((5,), node.dtype, use="result"))]
            b = BodyBuilder(region.name, given)
            at = b.program(0, 5)
            value = b.load(b.parameters[0], (at,))
            b.store(b.parameters[1], b.apply("multiply", value, b.constant(3.0, node.dtype)), (at,))
            return [(b.finish((5,)), roles)]

    families.register(Row("wrong", ("add",), Wrong()))
    try:
        assert families.outside() != before
        y = tg.tensor(values)
        np.testing.assert_array_equal((y + y).numpy(), 3 * values)  # not what was kept before
    finally:
        families.remove("wrong")
    assert families.outside() == before
    z = tg.tensor(values)
    np.testing.assert_array_equal((z + z).numpy(), 2 * values)


def test_its_breakpoints_are_ranges(halving: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = symbol("N", 1, 500)
    x = build.input_((rows, 4), tg.float32)
    assert breaks_of([build.add(x, x)], host()) == {}
    monkeypatch.setattr(Halving, "breaks", lambda self, node, target: [(node.shape[0], 100)])
    assert breaks_of([build.add(x, x)], host()) == {"N": (100,)}
    assert breaks_of([build.multiply(x, x)], host()) == {}


def test_few_rows_of_a_product_are_a_range() -> None:
    """On matrix units that are fed by copies, where there may be many more."""
    w = build.input_((64, 32), tg.bfloat16)

    def found(most: int, target: Target) -> dict[str, tuple[int, ...]]:
        x = build.input_((symbol("N", 1, most), 64), tg.bfloat16)
        return breaks_of([build.dot(x, w, ((), ()), ((1,), (0,)))], target)

    assert found(2048, H200) == {"N": (65, 129, 193, 257)} and found(256, H200) == {}
    assert found(2048, A100) == found(2048, host()) == {}
    with override(determinism="invariant"):
        assert found(2048, H200) == {}


PACKAGE = """
from tilegrad.schedule.families import Row
from tilegrad.schedule.family import Family

class Named(Family):
    '''Offers nothing.'''
    def offers(self, region):
        return "it only has a name"

ROW = Row("named", ("add",), Named())
"""
ASKS = """
import tilegrad as tg
print(tg.explain(lambda x: x + x, tg.zeros(3)).section("families"))
"""


def test_a_package_names_one_as_an_entry_point(tmp_path: Path) -> None:
    folder = tmp_path / "mine-1.0.dist-info"
    folder.mkdir()
    (tmp_path / "mine.py").write_text(PACKAGE)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[tilegrad.families]\nnamed = mine:ROW\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, "-c", ASKS],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert "named refuses: it only has a name" in found.stdout


def test_names_of_the_package_stay() -> None:
    with pytest.raises(UserError, match="is a Family of the package"):
        families.register(Row("calls", ("call",), Halving()))


def test_selection() -> None:
    class Says(Family):
        """Offers what it was told."""

        def __init__(self, name: str, *offers: float, fallback: bool = False) -> None:
            self.name, self.given, self.fallback = name, offers, fallback

        def offers(self, region: Region) -> Sequence[Offer] | str:
            return [Offer(s) for s in self.given] or "it has none"

    def chosen(*some: Family) -> tuple[str, float]:
        family, offer, verdict = select(some, region)
        assert verdict.winner == family.name
        assert len(verdict.offered) + len(verdict.refused) >= len(some)
        return family.name, offer.seconds

    node: Node = build.add(build.input_((3,), tg.float32), 1.0)
    region = Region("loops", host(), set(), [node])
    assert chosen(Says("a", 3.0, 2.0), Says("b", 2.5)) == ("a", 2.0)
    assert chosen(Says("a", 2.0), Says("b", 2.0)) == ("a", 2.0)  # a tie: the first
    assert chosen(Says("a", 1.0, fallback=True), Says("b", 9.0)) == ("b", 9.0)
    assert chosen(Says("a", 1.0, fallback=True), Says("b")) == ("a", 1.0)
    with pytest.raises(InternalError, match="b: it has none"):
        chosen(Says("b"))
