"""What an NPU's RTL must show in a cycle, as the register-level simulator has it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilegrad.targets.npu.arithmetic import bits_of, float_bits
from tilegrad.targets.npu.machine import Machine


def packed(values: np.ndarray, bits: int) -> int:
    """Numbers side by side, the first lowest."""
    flat = values.reshape(-1)
    if bits in (8, 16, 32):
        return int.from_bytes(flat.astype(f"<u{bits // 8}").tobytes(), "little")
    total = 0
    for i, value in enumerate(flat):
        total |= int(value) << i * bits
    return total


def registers(machine: Machine) -> dict[str, Any]:
    """Registers that the RTL has too, before the edge."""
    x, s, ld = machine.execute, machine.store, machine.load
    mixed = x.mesh.pairs is not None
    still = x.mesh.raw if mixed else bits_of(x.mesh.still, machine.p.element)
    found: dict[str, Any] = {
        "pc": machine.front.sequencer.pc,
        "front": machine.front.state,
        "tokens": list(machine.tokens.counts),
        "waiting": [len(q.items) for q in machine.queues],
        "states": [u.state for u in machine.units],
        "sums": sum_bits(machine, x.mesh.sums),
        "inputs": bits_of(x.mesh.inputs, machine.p.element).astype(np.int64),
        "still": still.astype(np.int64),
        "index": x.mesh.index.astype(np.int64),
        "arvalid": int(ld.asking),
        "araddr": ld.address if ld.asking else None,
        "arlen": ld.read[1] - 1 if ld.read else None,
        "awvalid": int(s.write is not None),
        "awaddr": s.write[0] if s.write else None,
        "awlen": s.write[1] - 1 if s.write else None,
        "wvalid": int(s.shown is not None),
        "wdata": s.shown[0] if s.shown else None,
        "wstrb": s.shown[1] if s.shown else None,
        "wlast": int(s.shown[2]) if s.shown else None,
    }
    return found


def events(machine: Machine) -> dict[str, Any]:
    """What was written in the cycle of the last step."""
    found: dict[str, Any] = {"scratchpad": None, "accumulator": None}
    if machine.load.written is not None:
        row, elements, index = machine.load.written
        found["scratchpad"] = (
            row,
            elements.astype(np.int64) | (index.astype(np.int64) << machine.p.element_bits),
        )
    if machine.execute.written is not None:
        row, values = machine.execute.written
        found["accumulator"] = (row, sum_bits(machine, values))
    return found


def sum_bits(machine: Machine, values: np.ndarray) -> np.ndarray:
    """The 32 bits of sums."""
    if machine.p.floating:
        return float_bits(values).astype(np.int64)
    return values.view(np.uint32).astype(np.int64)


def expected(machine: Machine) -> dict[str, int]:
    """The simulator's registers as the design packs them; what is not shown is left out."""
    p, found = machine.p, registers(machine)
    token, count = p.tokens.bit_length(), p.queue.bit_length()
    widths = {"sums": 32, "inputs": p.element_bits, "still": p.element_bits, "index": 2}
    widths |= {"tokens": token, "waiting": count, "states": 2}
    made = {}
    for name, value in found.items():
        if value is None or (name == "index" and not p.sparse):
            continue
        if isinstance(value, bytes):
            made[name] = int.from_bytes(value, "little")
        elif name in widths:
            made[name] = packed(np.asarray(value), widths[name])
        else:
            made[name] = int(value)
    return made
