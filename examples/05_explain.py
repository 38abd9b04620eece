"""explain: what the compiler makes of a function, from the Graph to the instructions."""

import tilegrad as tg


def layer(x, weight, bias):
    h = x @ weight + bias
    return (h * 1.0).softmax(-1)  # the multiplication by one will be simplified away


x, weight, bias = tg.randn(256, 128), tg.randn(128, 64), tg.randn(64)

# The short form: kernels, programs, work, memory, which Rules fired, and what bounds each kernel.
found = tg.explain(layer, x, weight, bias, level="summary")
print(found)

# Every part can be asked for by itself.
print(found.final_graph)
print(found.schedule)
for kernel in found.kernels:
    print(f"{kernel.name}: {kernel.intensity:.1f} FLOP/byte, bound by {kernel.bound}")

# The Tile IR of the first program, and how many vector instructions its assembly has.
program = found.programs[0]
print("\n".join(program.tile.splitlines()[:8]), "\n  ...")
lines = program.assembly.splitlines()
print(f"{len(lines)} lines of assembly, {sum('fma' in line for line in lines)} multiply-adds")

# A derivative is explained like any other function; so is a lazy Tensor.
gradient = tg.grad(lambda w: layer(x, w, bias).square().sum())
print(tg.explain(gradient, weight, level="summary").section("kernels"))
print(tg.explain((weight * 2).sum(), level="summary").section("summary"))
