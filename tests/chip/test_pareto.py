"""Many designs at once: fronts, what is refused, and the picture."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tilegrad.chip.estimate import areas, estimate
from tilegrad.chip.explore import gemm
from tilegrad.chip.networks import mobilenet_v1
from tilegrad.chip.pareto import Point, choices, explore_array, explore_npu, front, plotted
from tilegrad.chip.workload import Work, Workload
from tilegrad.core.errors import UserError
from tilegrad.targets.npu.parameters import preset

SMALL = Workload("small", tuple(Work(gemm(M=64, N=64, K=64, bits=8), "product") for _ in range(2)))


def test_a_front_has_what_none_beats() -> None:
    points = [
        Point({"n": n}, *values)
        for n, values in enumerate(
            [(1, 9, 5), (2, 8, 5), (2, 9, 5), (9, 1, 5), (9, 1, 5), (3, 8, 1), (9, 9, 9)]
        )
    ]
    by_three = front(points, ("energy", "seconds", "area"))
    assert [p.choice["n"] for p in by_three] == [3, 4, 1, 5, 0]
    for kept in by_three:
        for other in points:
            better = (
                other.energy <= kept.energy,
                other.seconds <= kept.seconds,
                other.area <= kept.area,
            )
            same = (other.energy, other.seconds, other.area) == (
                kept.energy,
                kept.seconds,
                kept.area,
            )
            assert not all(better) or same
    assert [p.choice["n"] for p in front(points, ("energy", "area"))] == [5, 0]


def test_npus_are_estimated_as_anywhere() -> None:
    told: list[tuple[int, int, str]] = []
    vary = {"rows": [8, 16], "dataflow": ["ws", "os"], "lanes": [4, 3]}
    assert len(choices(vary)) == 8
    found = explore_npu(preset("16x16"), SMALL, vary, lambda *one: told.append(one))
    assert len(found.points) == 4 and len(found.refused) == 4
    assert all("lanes" in why for _, why in found.refused)  # 3 do not divide 16 columns
    assert not any(".py" in why for _, why in found.refused)  # nor where in a program
    assert told[0] == (0, 8, "rows 8, dataflow ws, lanes 4") and told[-1] == (8, 8, "")
    plain = next(p for p in found.points if p.choice == {"rows": 16, "dataflow": "ws", "lanes": 4})
    made = estimate(preset("16x16"), SMALL)
    assert plain.seconds == made.seconds
    assert plain.energy == pytest.approx(1e-12 * sum(made.energy().values()))
    assert plain.area == pytest.approx(sum(areas(preset("16x16")).values()))
    assert set(map(id, found.front())) <= set(map(id, found.points))


def test_arrays_are_searched() -> None:
    table = {
        "mac": 0.2,
        "level": [
            {"name": "DRAM", "read": 64.0, "write": 64.0, "word_bits": 8},
            {
                "name": "buffer",
                "bytes": 8192,
                "read": 2.0,
                "write": 2.0,
                "word_bits": 8,
                "rows": 4,
                "columns": 4,
            },
        ],
    }
    vary = {"buffer.bytes": [1024, 16384], "dataflow": ["ws", "os"]}
    found = explore_array(table, "edge", SMALL, vary, rounds=2, samples=128)
    small, large = (
        min(p.energy for p in found.points if p.choice["buffer.bytes"] == size)
        for size in (1024, 16384)
    )
    assert large < small  # less comes from DRAM
    assert len({p.area for p in found.points}) == 2
    assert "area" not in table["level"][1]  # the given table stays
    with pytest.raises(UserError, match="none of the designs") as raised:
        explore_array(table, "edge", SMALL, {"cache.bytes": [1]})
    assert "no Level 'cache'" in str(raised.value)


def test_the_picture_is_whole() -> None:
    vary = {"rows": [8, 16, 32], "dataflow": ["ws", "os"]}
    found = explore_npu(preset("16x16"), mobilenet_v1(), vary)
    root = ElementTree.fromstring(plotted(found, "<a> & b"))
    dots = [e for e in root.iter() if e.tag.endswith("circle")]
    assert len(dots) == 3 * 6 + 2  # three panels, and two colours are named
    assert "rows 8, dataflow ws" in " ".join(root.itertext())
    lines = [e for e in root.iter() if e.get("class") == "front"]
    assert len(lines) == 3
    for circle in dots:
        assert 0 < float(circle.get("cx", "0")) < 1140 and 0 < float(circle.get("cy", "0")) < 400
