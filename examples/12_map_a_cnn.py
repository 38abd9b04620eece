"""Map a CNN onto an array: where its energy goes, and what a larger buffer buys.

A layer is a nest of loops. A Mapping says which turns of them run at which memory, and which side
by side; every choice has its own count of accesses. The explorer counts them exactly and searches.
"""

from dataclasses import replace

import tilegrad as tg
from tilegrad import nn
from tilegrad.chip.explore import Accelerator, Level, Mapping, convolution, cost_of
from tilegrad.chip.explore.search import search
from tilegrad.chip.mapped import map_network
from tilegrad.chip.workload import workload

array = Accelerator(
    "edge 8x8",
    (
        Level("DRAM", read=64.0, write=64.0, word_bits=8, read_bandwidth=8, write_bandwidth=8),
        Level("buffer", bytes=32e3, read=2.0, write=2.0, word_bits=8, rows=8, columns=8),
        Level("registers", bytes=64, read=0.1, write=0.1, word_bits=8),
    ),
    mac=0.2,
)

# 1. One layer, mapped by hand: filters over the columns, channels over the rows.
layer = convolution(M=32, C=16, P=28, Q=28, R=3, S=3, bits=8)
by_hand = cost_of(layer, array, Mapping.of("P28", "C2 Q28 | M8 | C8", "M4 R3 S3"))
print(f"by hand:  {by_hand.energy[0] / 1e6:6.2f} uJ, bound by {by_hand.bound_by()}")

# 2. The same, searched: several dataflows are only constraints.
for flow in ("ws", "os", "is", "any"):
    found = search(layer, array, flow, rounds=8, samples=1024)
    print(f"{flow:8}  {found.energy / 1e6:6.2f} uJ, {found.utilisation:4.0%} busy: {found.mapping}")

# 3. A whole network, from the function that computes it. No weights are needed.
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, 1, 1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, 1, 1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(32 * 8 * 8, 10),
)
work = workload(lambda x: model(x), tg.zeros((1, 3, 32, 32))).with_bits(8)
mapped = map_network(work, array, objective="energy", rounds=2, samples=512)
print(
    f"\nCNN: {work.macs / 1e6:.2f} M multiplications, {mapped.energy / 1e6:.2f} uJ, "
    f"{1e6 * mapped.seconds:.0f} us at 1 GHz"
)
for name, energy in mapped.parts().items():
    if energy:
        print(
            f"  {name:10} {energy / mapped.energy:6.1%} " + "#" * int(50 * energy / mapped.energy)
        )

# 4. Is a larger buffer worth its area?
for size in (4e3, 16e3, 64e3):
    levels = (array.levels[0], replace(array.levels[1], bytes=size), array.levels[2])
    other = map_network(
        work, replace(array, levels=levels), objective="energy", rounds=2, samples=512
    )
    print(f"buffer {size / 1e3:3.0f} kB: {other.energy / 1e6:6.2f} uJ")
