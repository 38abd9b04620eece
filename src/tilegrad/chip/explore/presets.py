"""Accelerators people know, as the explorer sees them.

Invariant: a preset's numbers come from what is published of the design; energies are relative to
a multiplication where the source says so.
"""

from __future__ import annotations

from .accelerator import Accelerator, Level


def eyeriss_energy(rows: int = 16, columns: int = 16, past: bool = False) -> Accelerator:
    """The array of Eyeriss' analysis (ISCA 2016): 512 bytes a multiplier, as much in the buffer.

    Energies of a 16-bit access over those of a multiplication: DRAM 200, buffer 6, array 2,
    registers 1. With `past`, as nn_dataflow has it: Operands may be brought past the buffer, and
    registers hold one word of each row that slides by, even where its sums come back later.
    """
    count = rows * columns
    return Accelerator(
        "eyeriss",
        (
            Level("DRAM", read=200.0, write=200.0),
            Level(
                "buffer",
                bytes=512.0 * count,
                read=6.0,
                write=6.0,
                network=2.0,
                rows=rows,
                columns=columns,
                sharing="halo",
                skips=("weights", "inputs", "outputs") if past else (),
            ),
            Level("registers", bytes=512.0, read=1.0, write=1.0, streams="Q" if past else ""),
        ),
        mac=1.0,
        clock=200e6,
    )


def tpu_v1() -> Accelerator:
    """The first TPU (ISCA 2017): 256 x 256 int8, weights from DRAM at 34 GB/s, 700 MHz.

    Inputs and results stay in the 24 MiB buffer on the chip, so that DRAM brings weights alone.
    """
    return Accelerator(
        "tpu-v1",
        (
            Level("host"),
            Level("DRAM", keeps=("weights",), read_bandwidth=34e9 / 700e6, word_bits=8),
            Level(
                "buffer",
                bytes=28.0 * 2**20,
                keeps=("inputs", "outputs"),
                word_bits=8,
                columns=256,
                rows=256,
            ),
            Level("array", keeps=("weights",), bytes=2.0, word_bits=8),
        ),
        clock=700e6,
    )


NVDLA = {  # multipliers: (atomic channels, atomic filters, buffer kB, DRAM GB/s, ResNet-50 fps)
    2048: (64, 32, 512, 20.0, 269.0),
    1024: (64, 16, 256, 15.0, 153.0),
    512: (32, 16, 256, 10.0, 93.0),
    256: (32, 8, 256, 5.0, 46.0),
    128: (16, 8, 256, 2.0, 20.0),
    64: (8, 8, 128, 1.0, 7.3),
    32: (8, 4, 128, 0.5, 3.6),
}


def nvdla(multipliers: int = 2048) -> Accelerator:
    """NVDLA (its primer's table, int8, 1 GHz): channels down, filters across, sums kept inside."""
    channels, filters, buffer, bandwidth, _ = NVDLA[multipliers]
    return Accelerator(
        f"nvdla-{multipliers}",
        (
            Level("DRAM", read_bandwidth=bandwidth, write_bandwidth=bandwidth, word_bits=8),
            Level(
                "buffer",
                bytes=buffer * 1000.0,
                keeps=("weights", "inputs"),
                word_bits=8,
            ),
            Level(
                "accumulators",
                bytes=4096.0 * filters,
                keeps=("outputs",),
                word_bits=8,
                rows=channels,
                columns=filters,
            ),
        ),
        clock=1e9,
    )


__all__ = ["NVDLA", "eyeriss_energy", "nvdla", "tpu_v1"]
