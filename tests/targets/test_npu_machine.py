"""The NPU's two layers: registers every cycle, and closed forms; they agree, and are right."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from npu_programs import Writer, random_memory, random_program, small

from tilegrad.core.errors import UserError
from tilegrad.targets.npu import execute, timing
from tilegrad.targets.npu.check import check_word
from tilegrad.targets.npu.functional import Functional
from tilegrad.targets.npu.instructions import assemble, instruction
from tilegrad.targets.npu.machine import Machine
from tilegrad.targets.npu.mesh import Mesh
from tilegrad.targets.npu.parameters import Parameters
from tilegrad.targets.npu.timing import counts_of, run_cycles, timeline

CHIPS = {
    "ws": small(),
    "os": small(dataflow="os"),
    "is": small(dataflow="is", rows=3, columns=5, lanes=5),
    "ws 2:4": small(sparse=True, weights="int4", stochastic=True),
    "os 2:4": small(sparse=True, dataflow="os", columns=6, lanes=3),
    "bf16": small(element="bf16", weights="fp8", stochastic=True),
    "os bf16": small(element="bf16", dataflow="os", sparse=True, dram_bandwidth=2.0),
    "os fp16": small(element="fp16", weights="fp8", dataflow="os", columns=6, lanes=3),
    "is int4": small(weights="int4", dataflow="is", rows=3, columns=5, lanes=5),
}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("seed", range(4))
def test_closed_forms_are_the_register_level(chip: str, seed: int) -> None:
    """Every instruction of a random program: when it is taken, and when it posts."""
    p = CHIPS[chip]
    program = random_program(p, seed)
    machine = Machine(p, program, random_memory(seed))
    cycles = machine.run(20_000)
    made = timeline(p, program)
    for queue in range(3):
        found = [(e.word.op, e.taken, e.posted) for e in made.events[queue]]
        assert found == machine.spans[queue]
    assert made.cycles == cycles


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("kind", ["move_in", "move_out", "preload", "matmul", "vector", "reduce"])
def test_each_instruction(chip: str, kind: str) -> None:
    p = CHIPS[chip]
    if kind == "preload" and p.dataflow == "os":
        pytest.skip("sums in place: nothing is loaded before")
    for seed in range(6):
        one = getattr(Writer(p, seed), kind)()
        machine = Machine(p, [one, instruction("halt")], random_memory(seed))
        machine.run(5000)
        ((_, taken, posted),) = machine.spans[one.queue]
        assert posted - taken - 1 == run_cycles(p, one)


@pytest.mark.parametrize("layer", ["closed forms", "registers"])
def test_an_off_by_one_is_seen(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In either layer: the last row streams a cycle longer."""

    def late(p: Parameters, word: object) -> int:
        return run_cycles(p, word) + (word.op == "matmul")

    monkeypatch.setattr(timing if layer == "closed forms" else execute, "run_cycles", late)
    with pytest.raises(AssertionError):
        test_closed_forms_are_the_register_level("ws", 0)


def product(p: Parameters, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """One tile of the mesh, by instructions: operands as they lie in DRAM."""
    memory = np.zeros(1 << 14, np.uint8)
    rows = []
    for base, array in ((0, left), (4096, right)):
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)
        stride = -(-raw.shape[1] // p.dma_bytes) * p.dma_bytes
        for i, row in enumerate(raw):
            memory[base + i * stride : base + i * stride + len(row)] = row
        rows.append((len(array), array.shape[1], stride))
    (m, k, s), (depth, n, t) = rows
    ahead = f"move_in local=0 rows={m} columns={k} stride={s} dram=0\n"
    ahead += (
        f"move_in local={p.bank_rows} rows={depth} columns={n} stride={t} dram=4096 post_next\n"
    )
    if p.dataflow == "os":
        work = f"matmul local=0 second={p.bank_rows} count={m} rows={k} drain=1 wait_prev post_next"
        results = k
    else:
        work = f"preload local={p.bank_rows} rows={depth} wait_prev\n"
        work += f"matmul local=0 count={m} post_next"
        results = m
    stride = -(-4 * p.columns // p.dma_bytes) * p.dma_bytes
    after = (
        f"\nmove_out rows={results} columns={p.columns} stride={stride} dram=8192 raw=1 wait_prev"
    )
    Machine(p, assemble(ahead + work + after + "\nhalt"), memory).run(10_000)
    kind = np.float32 if p.floating else np.int32
    found = memory[8192 : 8192 + results * stride].view(kind).reshape(results, -1)
    return found[:, :n]


def test_products_are_right() -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-128, 128, s).astype(np.int8) for s in ((9, 4), (4, 4)))
    np.testing.assert_array_equal(product(small(), a, b), a.astype(int) @ b)
    np.testing.assert_array_equal(product(small(dataflow="is"), b, a[:4]), b.astype(int) @ a[:4])
    b = rng.integers(-128, 128, (9, 4)).astype(np.int8)
    np.testing.assert_array_equal(product(small(dataflow="os"), a, b), a.astype(int).T @ b)


MIXED = {"int8": "int4", "bf16": "fp8", "fp16": "fp8"}


@pytest.mark.parametrize("dataflow", ["ws", "os"])
@pytest.mark.parametrize("element", MIXED)
def test_two_weights_in_a_place_are_two_products(dataflow: str, element: str) -> None:
    """Weights of half the bits: K is twice the rows of the mesh, or twice the steps."""
    p = small(dataflow=dataflow, element=element, weights=MIXED[element], sparse=dataflow == "os")
    rng = np.random.default_rng(3)
    steps = 5  # rows of inputs (ws), or pairs of K (os)
    places = (4, 4) if dataflow == "ws" else (steps, 4)
    low, high = (rng.integers(-8, 8, places).astype(np.int8) for _ in range(2))
    inputs = rng.integers(-100, 100, (steps, 8)).astype(np.int8)
    if element == "int8":
        both = (low & 15 | high << 4).astype(np.uint8)
        given = inputs.view(np.uint8)
    else:
        kind = ml_dtypes.bfloat16 if element == "bf16" else np.float16
        narrow = [x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for x in (low, high)]
        both = np.stack(narrow, -1).reshape(len(low), -1)
        given = inputs.astype(kind).view(np.uint8)
    memory = np.zeros(4096, np.uint8)
    for base, array in ((0, given), (1024, both)):
        memory[base : base + 64 * len(array)].reshape(-1, 64)[:, : array.shape[1]] = array
    text = f"move_in local=0 rows={steps} columns=8 stride=64 dram=0\n"
    text += f"move_in local=32 rows={len(low)} columns=4 stride=64 dram=1024 post_next\n"
    if dataflow == "ws":
        text += f"preload local=32 rows=4 wait_prev\nmatmul count={steps} mixed=1 post_next\n"
    else:
        text += f"matmul second=32 count={steps} rows=4 drain=1 mixed=1 wait_prev post_next\n"
    text += f"move_out rows={steps if dataflow == 'ws' else 4} columns=4 stride=64 dram=2048 raw=1 "
    program = assemble(text + "wait_prev\nhalt")
    found = memory.copy()
    machine = Machine(p, program, found)
    assert machine.run() == timeline(p, program).cycles
    assert machine.counts() == counts_of(p, program, machine.cycle)
    assert machine.execute.macs == 2 * 16 * steps
    x, w = inputs.astype(int), np.stack([low, high], 1).reshape(-1, 4).astype(int)
    expected = x @ w if dataflow == "ws" else x.reshape(-1, 4).T @ w
    made = found[2048 : 2048 + 64 * len(expected)].reshape(-1, 64)[:, :16]
    kind = np.float32 if p.floating else np.int32
    np.testing.assert_array_equal(np.ascontiguousarray(made).view(kind), expected)
    Functional(p, memory).run(program)
    np.testing.assert_array_equal(memory, found)


def test_a_chip_without_mixed_multipliers_refuses_two_weights() -> None:
    one = instruction("matmul", count=1, mixed=1)
    with pytest.raises(UserError, match="bad mixed"):
        check_word(small(), one)
    with pytest.raises(UserError, match="not with sparse"):
        check_word(
            small(sparse=True, weights="int4"), instruction("matmul", count=2, mixed=1, sparse=1)
        )


@pytest.mark.parametrize("dataflow", ["ws", "os"])
def test_two_of_four_is_the_masked_product(dataflow: str) -> None:
    """Half of the right operand's rows are stored, each with its place in a group of four."""
    rng = np.random.default_rng(2)
    p = small(dataflow=dataflow, sparse=True, dma_bytes=1, dram_bandwidth=1.0)
    depth = 8
    kept = np.sort(np.stack([rng.permutation(4)[:2] for _ in range(depth // 4 * 4)]), 1)
    kept = kept.reshape(depth // 4, 4, 2)  # group, column, which
    dense = rng.integers(-128, 128, (depth, 4)).astype(np.int8)
    mask = np.zeros((depth, 4), bool)
    stored, index = np.zeros((depth // 2, 4), np.int8), np.zeros((depth // 2, 4), np.uint8)
    for g in range(depth // 4):
        for c in range(4):
            for which, at in enumerate(kept[g, c]):
                mask[4 * g + at, c] = True
                stored[2 * g + which, c] = dense[4 * g + at, c]
                index[2 * g + which, c] = at
    left = rng.integers(-128, 128, (4, depth)).astype(np.int8)
    memory = np.zeros(1 << 13, np.uint8)
    packed = (index << np.arange(0, 8, 2, dtype=np.uint8)).sum(1).astype(np.uint8)
    memory[1024:1044] = np.concatenate([stored.view(np.uint8), packed[:, None]], 1).reshape(-1)
    lines = "move_in local=32 rows=4 columns=4 stride=5 dram=1024 indexed=1\n"
    if dataflow == "ws":
        memory[:32] = left.view(np.uint8).reshape(-1)
        lines += "move_in local=0 rows=4 columns=8 stride=8 dram=0 post_next\n"
        lines += "preload local=32 rows=4 wait_prev\nmatmul count=4 sparse=1 post_next\n"
    else:
        memory[:32] = left.T.reshape(4, 8).view(np.uint8).reshape(-1)  # pairs of steps
        lines += "move_in local=0 rows=4 columns=8 stride=8 dram=0 post_next\n"
        lines += "matmul second=32 count=4 rows=4 drain=1 sparse=1 wait_prev post_next\n"
    lines += "move_out rows=4 columns=4 stride=16 dram=2048 raw=1 wait_prev\nhalt"
    again = memory.copy()
    Machine(p, assemble(lines), memory).run(5000)
    Functional(p, again).run(assemble(lines))
    np.testing.assert_array_equal(again, memory)
    found = memory[2048:2112].view(np.int32).reshape(4, 4)
    np.testing.assert_array_equal(found, left.astype(int) @ (dense * mask))


def mesh_cycles(dataflow: str, side: int, m: int, n: int, k: int) -> int:
    """Steps of the mesh for a product, tile after tile, until its last multiplication.

    The cycle is counted in which a multiplier last takes an input; SCALE-Sim numbers cycles from 0.
    """
    p = Parameters(rows=side, columns=side, dataflow=dataflow, lanes=1)
    outer = {"ws": (k, n), "is": (k, m), "os": (m, n)}[dataflow]
    inner = {"ws": m, "is": n, "os": k}[dataflow]
    one = tile_cycles(p, inner)
    return -(-outer[0] // side) * -(-outer[1] // side) * one - 1


def tile_cycles(p: Parameters, inner: int) -> int:
    """Steps from the first edge until no multiplier has anything new: ones streamed as inputs."""
    mesh = Mesh(p)
    ones = np.ones(p.rows, np.int32)
    row = mesh.row(np.ones(p.columns, np.int32))
    if p.dataflow != "os":
        for _ in range(p.rows):
            mesh.step_stationary(None, row)
    last, steps = 0, 0 if p.dataflow == "os" else p.rows
    for turn in range(inner + 2 * (p.rows + p.columns)):
        feed = ones if turn < inner else None
        before = mesh.sums.copy()
        if p.dataflow == "os":
            mesh.step_output(feed, row if turn < inner else None, False, False)
            busy = (mesh.sums != before).any()
        else:
            mesh.step_stationary(feed, None)
            busy = mesh.inputs.any()
        steps += 1
        last = steps if busy else last
    if p.dataflow == "os":
        assert (mesh.sums == inner).all()
    return last


@pytest.mark.parametrize(
    ("sizes", "side", "expected"),
    [
        ((256, 128, 256), 8, (138239, 142335, 153599)),
        ((256, 128, 256), 16, (36607, 38655, 44543)),
        ((256, 128, 256), 32, (10175, 11199, 14207)),
        ((64, 64, 64), 16, (1503, 1759, 1759)),
        ((100, 50, 200), 8, (19473, 21349, 23399)),
        ((100, 50, 200), 32, (2095, 2715, 4031)),
        ((16, 16, 16), 8, (119, 151, 151)),
        ((16, 16, 16), 32, (77, 109, 109)),
        ((144, 256, 2304), 32, (94639, 137087, 125999)),
        ((49, 512, 2048), 32, (67519, 146431, 77567)),
        ((1, 1000, 2048), 32, (67519, 194559, 70015)),
    ],
)
def test_the_mesh_takes_scale_sims_cycles(
    sizes: tuple[int, int, int], side: int, expected: tuple[int, int, int]
) -> None:
    found = tuple(mesh_cycles(flow, side, *sizes) for flow in ("os", "ws", "is"))
    assert found == expected


def test_instructions_add_a_known_constant_to_the_mesh() -> None:
    """A memory is read in the cycle before its row is used; a sum is written in the cycle after it
    left, and with sums in place they drain a row a cycle."""
    for rows, columns, count in ((4, 4, 9), (3, 5, 1), (8, 2, 20)):
        given = {"rows": rows, "columns": columns, "lanes": 1}
        ws, os = small(**given), small(dataflow="os", **given)
        load = instruction("preload", rows=1)
        work = instruction("matmul", count=count)
        whole = instruction("matmul", count=count, drain=1, rows=1)
        assert run_cycles(ws, load) + run_cycles(ws, work) == tile_cycles(ws, count) + 1 + 2
        assert run_cycles(os, work) == tile_cycles(os, count) + 1
        assert run_cycles(os, whole) == tile_cycles(os, count) + 1 + rows


def test_queues_that_wait_for_each_other_are_an_error() -> None:
    lines = "sync queue=execute wait_next\nsync queue=store wait_prev\nhalt"
    with pytest.raises(UserError, match="wait for each other"):
        timeline(small(), assemble(lines))
    with pytest.raises(UserError, match="wait for each other"):
        Machine(small(), assemble(lines), random_memory(0)).run()


def test_a_slow_memory_changes_times_and_no_values() -> None:
    """Programs whose queues wait for each other give the same bytes with seeded stalls."""
    p = small()
    lines = """
    loop turns=3
      move_in local=0 rows=4 columns=4 stride=4 dram=0x40 post_next
      preload local=0 rows=4 wait_prev
      matmul local=0 count=4 result=0 accumulate=1 post_next post_prev
      move_out rows=4 columns=4 stride=4 scale=300 shift=12 dram=0x40 wait_prev post_prev
      sync queue=execute wait_next post_prev
      sync queue=load wait_next
      sync queue=load wait_next
    end
    halt"""
    results, cycles = [], []
    for stalls in (None, 1, 2):
        memory = random_memory(3)
        machine = Machine(p, assemble(lines), memory, stalls)
        cycles.append(machine.run(20_000))
        results.append(memory)
    assert cycles[0] < min(cycles[1:])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_counters_add_up() -> None:
    p = small()
    machine = Machine(p, random_program(p, 5), random_memory(5))
    cycles = machine.run()
    found = machine.counters()
    assert all(sum(causes.values()) == cycles for causes in found.causes.values())
    assert found.macs == machine.execute.macs < found.peak_macs * cycles
    busy = timeline(p, random_program(p, 5))
    for number, name in enumerate(("load", "execute", "store")):
        spent = sum(n for cause, n in found.causes[name].items() if cause not in ("empty", "token"))
        assert spent == sum(e.posted - e.taken + 1 for e in busy.events[number])
    assert found.energy["dram"] == p.energy.dram_byte * (
        found.bytes["dram_read"] + found.bytes["dram_written"]
    )
