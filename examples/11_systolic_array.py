"""A systolic array by hand: a product that flows through a grid of multipliers.

Every cell multiplies what comes from the left with what comes from above, adds to its own sum, and
passes both on. Rows of A and columns of B enter one cycle later each (the skew), so that A[i, k]
and B[k, j] meet in cell (i, j) at cycle i + j + k. This is the array of TPUs, in 30 lines.
"""

import numpy as np

from tilegrad.chip.explore.systolic import cycles


def systolic(a, b, show=False):
    """(rows, depth) @ (depth, columns), cycle by cycle; sums stay in place."""
    (rows, depth), columns = a.shape, b.shape[1]
    sums = np.zeros((rows, columns), int)
    right = np.zeros((rows, columns), int)  # registers: what moves right
    down = np.zeros((rows, columns), int)  # and what moves down
    clock = 0
    while clock < depth + rows + columns - 2:
        left_edge = [a[i, clock - i] if 0 <= clock - i < depth else 0 for i in range(rows)]
        top_edge = [b[clock - j, j] if 0 <= clock - j < depth else 0 for j in range(columns)]
        right = np.column_stack([left_edge, right[:, :-1]])
        down = np.vstack([top_edge, down[:-1]])
        sums += right * down
        if show:
            busy = (right != 0) & (down != 0)
            lines = ("".join("#" if x else "." for x in row) for row in busy)
            print(f"cycle {clock:2}:  " + "  ".join(lines))
        clock += 1
    return sums, clock


random = np.random.default_rng(0)
a, b = random.integers(1, 9, (4, 5)), random.integers(1, 9, (5, 4))
print("who works when (# busy), rows of the array side by side:")
product, clock = systolic(a, b, show=True)
assert (product == a @ b).all()
print(f"4x4 array, depth 5: {clock} cycles; busy {4 * 4 * 5 / (16 * clock):.0%} of the time")

# The closed form counts from 0: a wave of depth K takes K + rows + columns - 2 cycles.
assert cycles("os", 4, 4, M=4, N=4, K=5) == clock - 1

# A deeper sum hides the skew; a larger array shows it.
for side in (8, 32, 128):
    for depth in (64, 1024):
        found = cycles("os", side, side, M=side, N=side, K=depth) + 1
        print(f"{side:3} x {side:<3} depth {depth:4}: {found:5} cycles, {depth / found:4.0%} busy")

# What stays in place decides: tall products suit weights, deep ones suit sums.
for name, (m, n, k) in {"tall": (3136, 64, 64), "deep": (49, 512, 2048)}.items():
    counts = {flow: cycles(flow, 32, 32, M=m, N=n, K=k) for flow in ("os", "ws", "is")}
    best = min(counts, key=counts.get)
    print(f"{name} ({m} x {k} @ {k} x {n}): {counts}, best {best}")
