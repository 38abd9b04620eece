"""Kernels in the tile language: softmax, matmul and flash attention, beside plain Tensor code."""

import tilegrad as tg
from tilegrad import kernel, tile
from tilegrad.tile import INF, KTile, f16, f32


@kernel
def softmax(x):
    rows, columns = x.shape
    block = 64
    i = tile.grid(rows)  # one program for each row
    out = tile.result(x.shape, x.dtype)
    largest, total = tile.full((), -INF), tile.zeros(())
    for j in tile.range(0, columns, block):  # the last block may be partial: no mask is needed
        part = tile.load(x, (i, j), (block,))
        new = tile.maximum(largest, tile.max(part))
        total = total * tile.exp(largest - new) + tile.sum(tile.exp(part - new))
        largest = new
    for j in tile.range(0, columns, block):
        out[i, j : j + block] = tile.exp(x[i, j : j + block] - largest) / total


@softmax.vjp
def softmax_backward(inputs, y, g):
    return ((g - (g * y).sum(-1, keepdim=True)) * y,)


@kernel
def matmul(a, b):
    (m, k), n = a.shape, b.shape[1]
    T = tile.context()  # block sizes: chosen for the machine, or by `schedule`
    i, j = tile.grid(tile.ceil_divide(m, T.m), tile.ceil_divide(n, T.n))
    total = tile.zeros((T.m, T.n), f32)
    for p in tile.range(0, k, T.k):
        left = tile.load(a, (i * T.m, p), (T.m, T.k))
        right = tile.load(b, (p, j * T.n), (T.k, T.n))
        total = tile.dot(left, right, total)
    tile.store(tile.result((m, n), a.dtype), (i * T.m, j * T.n), total)


@kernel.autotune(space=dict(BM=[32, 64], BN=[64], vector=[8]), budget_ms=50, cache="")
def flash_attention(Q: KTile[f16], K: KTile[f16], V: KTile[f16]) -> KTile[f16]:
    T = tile.context()
    Qb = tile.load(Q, rows=T.m, cols=T.d)  # rows of this program, out of all heads
    acc, m, total = tile.zeros((T.m, T.d)), tile.full((T.m,), -INF), tile.zeros((T.m,))
    for block in tile.range_n(K.shape, T.n):
        Kb, Vb = tile.load(K, block, cols=T.d), tile.load(V, block, cols=T.d)
        scores = tile.dot(Qb, tile.transpose(Kb)) * tile.rsqrt(float(T.d))
        p, m_now, l_now = tile.softmax_online(scores)
        acc, m, total = tile.softmax_accumulate(acc, m, total, p, Vb, m_now, l_now)
    return tile.cast(acc / total[:, None], f16)


def error(mine, plain):
    return (mine.to(tg.float32) - plain.to(tg.float32)).abs().max().item()


tg.manual_seed(0)
x, w = tg.randn(100, 300), tg.randn(300, 200)
print(f"softmax   {error(softmax(x), tg.softmax(x, -1)):.1e}")
print(f"matmul    {error(matmul(x, w), x @ w):.1e}")
fused = tg.jit(lambda x, w: softmax(matmul(x, w)) + 1)  # kernels and ordinary ops in one jit
print(f"in a jit  {error(fused(x, w), tg.softmax(x @ w, -1) + 1):.1e}")
mine = tg.grad(lambda x: (softmax(x) ** 2).sum())(x)
plain = tg.grad(lambda x: (tg.softmax(x, -1) ** 2).sum())(x)
print(f"gradient  {error(mine, plain):.1e}")
q, k, v = (tg.randn(2, 4, 100, 64).to(f16) for _ in range(3))
scores = q.to(f32) @ k.to(f32).transpose(-1, -2) / 8
plain = tg.softmax(scores, -1) @ v.to(f32)
print(f"attention {error(flash_attention(q, k, v), plain):.1e}")
print(flash_attention.report())
