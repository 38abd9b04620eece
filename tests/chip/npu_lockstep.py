"""cocotb: an NPU's RTL beside the register-level simulator, compared in every cycle.

The simulator's DRAM answers the RTL's port; what both show, hold and write must be equal. Runs
inside an HDL simulator; `NPU_LOCKSTEP` names a file with the parameters and the seeds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import FallingEdge, RisingEdge
from npu_programs import random_memory, random_program
from npu_view import events, expected, packed

from tilegrad.targets.npu.instructions import Instruction, encode
from tilegrad.targets.npu.machine import Machine
from tilegrad.targets.npu.parameters import Parameters

GIVEN = json.loads(Path(os.environ["NPU_LOCKSTEP"]).read_text())


def number(handle: object) -> int:
    """The value of a signal that has no unknown bits."""
    return int(handle.value)  # type: ignore[attr-defined]


class Bench:
    """The signals of the design, named as the simulator names them."""

    def __init__(self, dut: object, p: Parameters) -> None:
        self.dut, self.p = dut, p
        self.mesh = dut.execute.mesh
        self.fields = {
            "pc": dut.pc,
            "front": dut.front_state,
            "tokens": dut.tokens,
            "waiting": dut.waiting,
            "states": dut.states,
            "sums": self.mesh.sums,
            "inputs": self.mesh.inputs,
            "still": self.mesh.still,
            "index": self.mesh.index,
        }
        for name in ("arvalid", "araddr", "arlen", "awvalid", "awaddr", "awlen", "wvalid"):
            self.fields[name] = getattr(dut, f"m_{name}")
        for name in ("wdata", "wstrb", "wlast"):
            self.fields[name] = getattr(dut, f"m_{name}")

    def compare(self, machine: Machine, seed: int) -> None:
        """Registers before the edge; then the edge, and what was written in it."""
        for name, value in expected(machine).items():
            found = number(self.fields[name])
            assert found == value, (
                f"seed {seed} cycle {machine.cycle} {name}: {found:#x} {value:#x}"
            )
        machine.step()
        written = events(machine)
        for name, write, row, data, bits in (
            (
                "scratchpad",
                self.dut.scratch_write,
                self.dut.scratch_row,
                self.dut.scratch_d,
                self.p.stored_bits,
            ),
            (
                "accumulator",
                self.dut.sum_write,
                self.dut.sum_write_row,
                self.dut.accumulator.data,
                32,
            ),
        ):
            where = f"seed {seed} cycle {machine.cycle - 1} {name}"
            event = written[name]
            assert number(write) == (event is not None), f"{where}: written {number(write)}"
            if event is not None:
                assert number(row) == event[0], f"{where}: row {number(row)}, {event[0]}"
                want = packed(event[1], bits)
                assert number(data) == want, f"{where}: {number(data):#x} {want:#x}"

    def drive(self, machine: Machine) -> None:
        """What DRAM shows in this cycle."""
        dut, dram = self.dut, machine.dram
        dut.m_arready.value = int(dram.arready)
        dut.m_awready.value = int(dram.awready)
        dut.m_wready.value = int(dram.wready)
        dut.m_rvalid.value = int(dram.rvalid)
        dut.m_rdata.value = int.from_bytes(dram.rdata, "little")
        dut.m_rlast.value = int(dram.rlast)
        dut.m_bvalid.value = int(dram.bvalid)

    async def send(self, address: int, data: int) -> None:
        """One write of the control port."""
        dut = self.dut
        dut.s_awaddr.value, dut.s_wdata.value = address, data
        dut.s_awvalid.value = dut.s_wvalid.value = 1
        await RisingEdge(dut.clk)
        dut.s_awvalid.value = dut.s_wvalid.value = 0

    async def start(self, program: list[Instruction]) -> None:
        """Writes a program and starts it; the next cycle fetches its first word."""
        dut = self.dut
        for name in ("rst", "s_awvalid", "s_wvalid", "s_arvalid", "m_rvalid", "m_bvalid"):
            getattr(dut, name).value = 0
        for name in ("m_rresp", "m_bresp", "s_araddr", "m_arready", "m_awready", "m_wready"):
            getattr(dut, name).value = 0
        dut.s_bready.value = dut.s_rready.value = 1
        dut.rst.value = 1
        for _ in range(max(self.p.rows, self.p.columns) + 2):
            await RisingEdge(dut.clk)
        dut.rst.value = 0
        await RisingEdge(dut.clk)
        await self.send(8, 0)
        await RisingEdge(dut.clk)
        for one in program:
            for part in range(4):
                await self.send(12, encode(one) >> 32 * part & 0xFFFFFFFF)
                await RisingEdge(dut.clk)
        await self.send(0, 1)


async def record(dut: object, path: str) -> None:
    """Writes what every port shows before each edge."""
    from rtl_run import ports

    handles = [getattr(dut, name) for _, name in ports()]
    with Path(path).open("w") as file:
        while True:
            await FallingEdge(dut.clk)  # type: ignore[attr-defined]
            shown = [h.value for h in handles]
            file.write(" ".join(f"{int(v):x}" if v.is_resolvable else "-" for v in shown) + "\n")
            file.flush()


@cocotb.test()
async def lockstep(dut: object) -> None:
    """Random programs by seed, every cycle."""
    p = Parameters.of(GIVEN["parameters"])
    bench = Bench(dut, p)
    cocotb.start_soon(Clock(dut.clk, 10, "ns").start())
    if GIVEN.get("trace"):
        cocotb.start_soon(record(dut, GIVEN["trace"]))
    total = 0
    before: Machine | None = None
    for seed in GIVEN["seeds"]:
        program = random_program(p, seed)
        memory = random_memory(seed, floating=p.floating)
        machine = Machine(p, program, memory, GIVEN.get("stalls"))
        if total == 0:
            await RisingEdge(dut.clk)
        await bench.start(program)
        if before is not None:  # memories keep what the last program left
            machine.memories.scratchpad[:] = before.memories.scratchpad
            machine.memories.indices[:] = before.memories.indices
            machine.memories.sums[:] = before.memories.sums
        while not machine.done:
            bench.drive(machine)
            await FallingEdge(dut.clk)
            bench.compare(machine, seed)
            await RisingEdge(dut.clk)
            assert machine.cycle < GIVEN.get("most", 20_000)
        await FallingEdge(dut.clk)
        assert number(dut.finished) == 1
        total, before = total + machine.cycle, machine
    dut._log.info(f"{total} cycles of {len(GIVEN['seeds'])} programs are equal")
