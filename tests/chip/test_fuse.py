"""Layers that run together: counts against a run of every part, and what is gained."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tilegrad.chip.explore import Accelerator, Level, Mapping, Problem, convolution, cost_of, gemm
from tilegrad.chip.explore.fuse import (
    Fusion,
    Piece,
    best_fusion,
    fuse,
    kept_bytes,
    pieces,
    rows_by_part,
    search_fused,
)
from tilegrad.chip.explore.interpret import MappingRun
from tilegrad.chip.explore.search import search
from tilegrad.core.errors import UserError

KINDS = ("reads", "fills", "updates", "drains")
ARRAY = Accelerator(
    "array",
    (
        Level("DRAM", read=200.0, write=200.0, word_bits=8, read_bandwidth=4, write_bandwidth=4),
        Level("buffer", bytes=4000, read=6.0, write=6.0, word_bits=8, rows=2, columns=2),
        Level("registers", bytes=64, read=1.0, write=1.0, word_bits=8),
    ),
)
SAME = [  # 3 x 3 windows with padding
    convolution(M=4, C=2, P=6, Q=6, R=3, S=3, bits=8),
    convolution(M=2, C=4, P=6, Q=6, R=3, S=3, bits=8),
]
SHRINKS = [  # a stride, and no padding
    convolution(M=2, C=3, P=9, Q=9, R=1, S=1, bits=8),
    convolution(M=4, C=2, P=4, Q=4, R=3, S=3, stride=2, bits=8),
    convolution(M=2, C=4, P=4, Q=4, R=1, S=1, bits=8),
]
PRODUCTS = [gemm(M=8, N=12, K=6, bits=8), gemm(M=8, N=4, K=12, bits=8)]


def plain(piece: Piece) -> Mapping:
    """A Mapping of a Piece: features over the array, what is left in time, rows outermost."""
    sizes = piece.problem.sizes
    outside = f"P{sizes['P']}"
    half = sizes["M"] // 2
    inner = " ".join(f"{loop}{sizes[loop]}" for loop in "CRSQ" if sizes[loop] > 1)
    return Mapping.of(outside, f"{inner} M{half} | M2 |", "")


# ---- the judge: every part run, with nothing of `fuse` but the order of layers ----------------


def needed_rows(first: Problem, second: Problem, rows: Sequence[int]) -> set[int]:
    """Rows of the first that results in some rows of the second read, by every index there is."""
    stride, dilation = second.facts["stride"], second.facts["dilation"]
    whole = {
        stride * p + dilation * r
        for p in range(second.sizes["P"])
        for r in range(second.sizes["R"])
    }
    above = max(max(whole) + 1 - first.sizes["P"], 0) // 2
    touched = {stride * p + dilation * r - above for p in rows for r in range(second.sizes["R"])}
    return {row for row in touched if 0 <= row < first.sizes["P"]}


def words_of_parts(chain: Sequence[Problem], parts: int) -> list[list[set[int]]]:
    """Rows that each layer makes in each part, as sets."""
    total = chain[-1].sizes["P"]
    done: list[set[int]] = [set() for _ in chain]
    found: list[list[set[int]]] = [[] for _ in chain]
    for part in range(parts):
        wanted = set(range(total * part // parts, total * (part + 1) // parts))
        fresh = [set[int]() for _ in chain]
        for layer in reversed(range(len(chain))):
            fresh[layer] = wanted - done[layer]
            if layer:
                rows = sorted(fresh[layer])
                wanted = needed_rows(chain[layer - 1], chain[layer], rows)
                if part == parts - 1:  # what nobody reads is made too
                    wanted |= set(range(chain[layer - 1].sizes["P"]))
                wanted |= (
                    set(range(min(wanted | {0}), max(wanted, default=-1) + 1)) - done[layer - 1]
                )
        for layer, rows in enumerate(fresh):
            done[layer] |= rows
            found[layer].append(rows)
    return found


@pytest.mark.parametrize("chain", [SAME, SHRINKS, PRODUCTS], ids=["same", "shrinks", "products"])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_rows_are_made_once_and_in_time(chain: list[Problem], parts: int) -> None:
    found = rows_by_part(chain, parts)
    for layer, sets in enumerate(words_of_parts(chain, parts)):
        assert [set(range(*rows)) for rows in found[layer]] == sets
        assert found[layer][-1][1] == chain[layer].sizes["P"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("chain", [SAME, SHRINKS, PRODUCTS], ids=["same", "shrinks", "products"])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("resident", [(), (0,), (0, 1)])
def test_counts_are_those_of_a_run(
    chain: list[Problem], parts: int, resident: tuple[int, ...]
) -> None:
    fusion = Fusion("buffer", parts, frozenset(resident))
    found = fuse(chain, ARRAY, fusion, plain)
    made = {(piece.layer, piece.problem.sizes["P"]): piece for piece in pieces(chain, fusion)}
    total: Counter[tuple[int, str, str, str]] = Counter()
    for layer, parts_of in enumerate(words_of_parts(chain, parts)):
        for rows in filter(None, parts_of):
            piece = made[layer, len(rows)]
            for (level, operand, kind), words in run_of(piece).items():
                total[layer, level, operand, kind] += words
        if layer in resident:
            weights = chain[layer].words(chain[layer].operand("weights"))
            total[layer, "DRAM", "weights", "reads"] += weights
            total[layer, "buffer", "weights", "fills"] += weights
    for layer, level, operand in itertools.product(
        range(len(chain)), ("DRAM", "buffer", "registers"), ("weights", "inputs", "outputs")
    ):
        expected = {kind: total[layer, level, operand, kind] for kind in KINDS}
        assert found.words(level, layer, operand) == expected, (layer, level, operand)


def run_of(piece: Piece) -> Counter[tuple[str, str, str]]:
    """The run of a Piece, on Levels of which those above the buffer lack what lies inside."""
    above = tuple(n for n in ("weights", "inputs", "outputs") if n not in piece.inside)
    outer, *rest = ARRAY.levels
    kept = Level(outer.name, keeps=above, word_bits=8)
    machine = Accelerator("run", (kept, *rest), inside=piece.inside)
    return MappingRun(piece.problem, machine, plain(piece)).run()


@pytest.mark.parametrize("chain", [SAME, SHRINKS, PRODUCTS], ids=["same", "shrinks", "products"])
def test_what_lies_between_never_leaves_the_buffer(chain: list[Problem]) -> None:
    found = fuse(chain, ARRAY, Fusion("buffer", 2, frozenset(range(len(chain)))), plain)
    for layer in range(len(chain)):
        dram = {o: found.words("DRAM", layer, o) for o in ("weights", "inputs", "outputs")}
        if layer:
            assert not any(dram["inputs"].values())
        if layer < len(chain) - 1:
            assert not any(dram["outputs"].values())
        weights = chain[layer].operand("weights")
        assert dram["weights"]["reads"] == chain[layer].words(weights)
    last = chain[-1]
    assert found.words("DRAM", len(chain) - 1, "outputs")["updates"] == last.words(last.result)


def test_one_part_saves_what_would_go_up_and_come_back() -> None:
    apart = 0.0
    for layer, problem in enumerate(PRODUCTS):
        piece = Piece(layer, problem, 1, ())
        made = cost_of(problem, ARRAY, plain(piece))
        for operand in problem.operands:
            access = made.counts.at("DRAM", operand.name)
            apart += float(access.reads[0] + access.updates[0])
    found = fuse(PRODUCTS, ARRAY, Fusion("buffer"), plain)
    together = sum(
        found.words("DRAM", layer, o)[kind]
        for layer in range(2)
        for o in ("weights", "inputs", "outputs")
        for kind in ("reads", "updates")
    )
    between = PRODUCTS[0].words(PRODUCTS[0].result)
    assert apart - together == 2 * between


def test_bytes_that_are_taken() -> None:
    assert kept_bytes(PRODUCTS, Fusion("buffer", 1)) == 8 * 12
    assert kept_bytes(PRODUCTS, Fusion("buffer", 8)) == 12
    assert kept_bytes(PRODUCTS, Fusion("buffer", 8, frozenset({1}))) == 12 + 48
    # a window of 3 rows needs 3 of them, where each part makes one
    assert kept_bytes(SAME, Fusion("buffer", 6)) == 3 * 6 * 4


def test_searching_finds_less_energy_together() -> None:
    quick: dict[str, Any] = {"rounds": 1, "samples": 64, "objective": "energy"}
    apart = sum(search(problem, ARRAY, "ws", **quick).energy for problem in PRODUCTS)
    found = best_fusion(PRODUCTS, ARRAY, "buffer", "ws", **quick)
    assert found.energy < apart and found.cycles > 0
    assert not any(found.words("DRAM", 1, "inputs").values())
    parts = sum(p.times * float(c.energy[0]) for p, _, c in found.made)
    loaded = sum(found.loaded.values()) * (200.0 + 6.0)
    assert found.energy == pytest.approx(parts + loaded)


def test_chains_that_cannot_be() -> None:
    with pytest.raises(UserError, match="layer 1 does not take what layer 0 makes"):
        fuse([SAME[0], SAME[0]], ARRAY, Fusion("buffer"), plain)
    with pytest.raises(UserError, match="layer 1 does not take") as raised:
        fuse([SAME[0], convolution(M=2, C=4, P=3, Q=3)], ARRAY, Fusion("buffer"), plain)
    assert "about 6 along P" in str(raised.value)
    with pytest.raises(UserError, match="bad parts") as raised:
        fuse(SAME, ARRAY, Fusion("buffer", 7), plain)
    assert "1 to 6" in str(raised.value)
    with pytest.raises(UserError, match="bad Level"):
        fuse(SAME, ARRAY, Fusion("DRAM"), plain)
    small = Accelerator("small", (ARRAY.levels[0], Level("buffer", bytes=100, word_bits=8)))
    with pytest.raises(UserError, match="does not fit in buffer") as raised:
        search_fused(SAME, small, Fusion("buffer"))
    assert "at most 100 bytes" in str(raised.value) and "144 bytes" in str(raised.value)
    past = Accelerator("past", (ARRAY.levels[0], Level("buffer", keeps=("weights",))))
    with pytest.raises(UserError, match="buffer does not keep outputs"):
        search_fused(SAME, past, Fusion("buffer"))
