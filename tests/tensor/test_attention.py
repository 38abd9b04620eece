"""Attention against torch and float64: values, gradients, second derivatives, options, errors."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_peer import close, compare, random_array, torch

import tilegrad
from tilegrad import Tensor, grad, jit, manual_seed, nn, vmap
from tilegrad.core.errors import DTypeError, ShapeError, UserError
from tilegrad.nn.functional import scaled_dot_product_attention
from tilegrad.tensor.attention import attention

functional = torch.nn.functional


Q, K, V = (random_array((2, 4, 3, 8), i) for i in range(3))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_attention(options: dict) -> None:
    compare(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, **options),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **options),
        Q,
        K,
        V,
    )


def test_attention_masks() -> None:
    mask = random_array((3, 3)) > -0.5
    mask[1] = False  # a query that may look nowhere
    for each in (mask, random_array((2, 1, 3, 3), 5)):
        compare(
            lambda q, k, v, m=each: scaled_dot_product_attention(q, k, v, Tensor(m)),
            lambda q, k, v, m=each: functional.scaled_dot_product_attention(
                q, k, v, torch.tensor(m)
            ),
            Q,
            K,
            V,
        )


def test_attention_with_shared_heads() -> None:
    compare(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        Q,
        random_array((2, 2, 5, 8), 1),
        random_array((2, 2, 5, 8), 2),
    )


def test_attention_in_bfloat16() -> None:
    ours = scaled_dot_product_attention(*(Tensor(x).to("bfloat16") for x in (Q, K, V)))
    theirs = functional.scaled_dot_product_attention(*(torch.tensor(x) for x in (Q, K, V)))
    assert ours.dtype.name == "bfloat16"
    np.testing.assert_allclose(ours.float().numpy(), theirs.numpy(), atol=3e-2)


def test_attention_dropout_draws_anew_under_jit() -> None:
    manual_seed(0)
    run = jit(lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    first, second = (run(Tensor(Q), Tensor(K), Tensor(V)).numpy() for _ in range(2))
    assert not np.allclose(first, second)


@pytest.mark.parametrize("axes", [2, 3, 5])
def test_any_leading_axes(axes: int) -> None:
    lead = {2: (), 3: (4,), 5: (2, 1, 4)}[axes]
    q, k, v = (random_array((*lead, t, 8), t) for t in (3, 5, 5))
    for mask in (None, random_array((3, 5), 5), random_array((1,) * (axes - 2) + (3, 5), 6)):
        given_masks = () if mask is None else (mask,)
        compare(
            scaled_dot_product_attention,
            functional.scaled_dot_product_attention,
            q,
            k,
            v,
            *given_masks,
        )


def test_broadcast_batches_and_heads() -> None:
    q, k, v = random_array((2, 4, 3, 8)), random_array((1, 1, 5, 8), 1), random_array((5, 8), 2)
    wide = [np.broadcast_to(x, (2, 4, *x.shape[-2:])) for x in (q, k, v)]
    ours = scaled_dot_product_attention(Tensor(q), Tensor(k), Tensor(v))
    theirs = functional.scaled_dot_product_attention(*(torch.tensor(x.copy()) for x in wide))
    close(ours, theirs)


def test_a_mask_of_each_batch_over_two_leading_axes() -> None:
    q = random_array((2, 3, 4, 5, 8))
    mask = random_array((2, 1, 1, 5, 5), 3)
    compare(
        lambda q, m: scaled_dot_product_attention(q, q, q, m),
        lambda q, m: functional.scaled_dot_product_attention(q, q, q, m),
        q,
        mask,
    )


# ---- attention with every option against its definition ---------------------------------------


def defined(
    q,
    k,
    v,
    *,
    scale=None,
    low=None,
    high=None,
    softcap=0.0,
    bias=None,
    mask=None,
    slopes=None,
    sinks=None,
    key_lengths=None,
):
    """(out, lse) in torch by the definition: q (B, H, Tq, D), k and v with fewer heads."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    steps = torch.arange(k.shape[2])[None, :] - torch.arange(q.shape[2])[:, None]
    if slopes is not None:
        s = s + slopes[:, None, None] * steps
    seen = torch.ones(s.shape, dtype=torch.bool)
    seen &= steps >= (-(10**6) if low is None else low)
    seen &= steps <= (10**6 if high is None else high)
    if mask is not None:
        seen = seen & mask
    if key_lengths is not None:
        seen &= torch.arange(k.shape[2]) < key_lengths[:, None, None, None]
    s = s.masked_fill(~seen, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:1], -1, s.shape[2], -1)], -1)
    nothing = (s == -math.inf).all(-1)
    s = s.masked_fill(nothing[..., None], 0.0)
    p = torch.softmax(s, -1).masked_fill(nothing[..., None], 0.0)
    lse = torch.logsumexp(s, -1).masked_fill(nothing, -math.inf)
    return p[..., : k.shape[2]] @ v, lse


@st.composite
def problems(draw):
    """Sizes, options for us and for the definition, and the arrays of both."""
    flag = st.booleans()
    heads, group = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]))
    batch, queries, keys = draw(st.tuples(st.integers(1, 2), st.integers(1, 6), st.integers(1, 7)))
    ours, theirs, arrays = {}, {}, {}
    if draw(flag):
        ours["softcap"] = theirs["softcap"] = 1.5
    if draw(flag):
        ours["scale"] = theirs["scale"] = 0.4
    causal = draw(st.sampled_from([False, True, "bottom_right"]))
    shift = keys - queries if causal == "bottom_right" else 0
    theirs["high"] = shift if causal else None
    window = draw(st.sampled_from([None, 1, 3, (2, 1), (None, 2)]))
    if window is not None:
        left = window - 1 if isinstance(window, int) else window[0]
        right = window - 1 if isinstance(window, int) else window[1]
        theirs["low"] = None if left is None else shift - left
        theirs["high"] = theirs["high"] if causal else right
    ours.update(causal=causal, window=window)
    rng = np.random.default_rng(draw(st.integers(0, 10)))
    some = [draw(flag) for _ in range(4)]
    shape = [n if on else 1 for n, on in zip((batch, heads, queries, keys), some)]
    if draw(flag):
        arrays["bias"] = rng.standard_normal(shape)
    if draw(flag):
        arrays["mask"] = rng.random(shape) < 0.7
    for name in ("slopes", "sinks"):
        if draw(flag):
            arrays[name] = rng.standard_normal(heads)
    if draw(flag):
        arrays["key_lengths"] = rng.integers(0, keys + 1, batch)
    arrays["q"] = rng.standard_normal((batch, heads, queries, 4))
    arrays["k"] = rng.standard_normal((batch, heads // group, keys, 4))
    arrays["v"] = rng.standard_normal((batch, heads // group, keys, 3))
    return ours, theirs, arrays, draw(st.sampled_from(["bhtd", "bthd"]))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(problems())
def test_every_option(problem) -> None:
    options, theirs, arrays, layout = problem
    mine = {n: Tensor(a) for n, a in arrays.items()}
    peers = {n: torch.tensor(a) for n, a in arrays.items()}
    for name in mine:
        if arrays[name].dtype == np.float64:
            mine[name].requires_grad, peers[name].requires_grad = True, True
    order = (0, 2, 1, 3) if layout == "bthd" else (0, 1, 2, 3)
    laid = [mine[n].permute(*order) for n in "qkv"]
    extras = {n: x for n, x in mine.items() if n not in "qkv"}
    out, lse = attention(*laid, **options, **extras, layout=layout, return_lse=True)
    extras = {n: x for n, x in peers.items() if n not in "qkv"}
    wanted, wanted_lse = defined(peers["q"], peers["k"], peers["v"], **theirs, **extras)
    out = out.permute(*order)
    close(out, wanted, 1e-9)
    close(lse, wanted_lse, 1e-9)
    weights = np.random.default_rng(3).standard_normal(out.shape)
    seen = np.isfinite(wanted_lse.detach().numpy())
    ours_loss = (out * Tensor(weights)).sum() + tilegrad.where(Tensor(seen), lse, 0.0).sum()
    picked = torch.where(torch.tensor(seen), wanted_lse, torch.zeros_like(wanted_lse))
    ((wanted * torch.tensor(weights)).sum() + picked.sum()).backward()
    ours_loss.backward()
    for name, peer in peers.items():
        if peer.grad is not None:
            found = mine[name].grad.numpy()
            np.testing.assert_allclose(found, peer.grad.numpy(), rtol=1e-8, atol=1e-9, err_msg=name)


def test_packed_sequences_are_the_sequences_alone() -> None:
    lengths = [(3, 4), (0, 2), (2, 0), (1, 1), (4, 4)]
    starts = [np.cumsum([0, *(pair[i] for pair in lengths)]) for i in (0, 1)]
    q = random_array((int(starts[0][-1]) + 1, 4, 8))  # a token at the end belongs to none
    k, v = (random_array((int(starts[1][-1]), 2, 8), i) for i in (1, 2))
    slopes = random_array((4,), 4)
    out, lse = attention(
        Tensor(q),
        Tensor(k),
        Tensor(v),
        causal=True,
        window=3,
        slopes=Tensor(slopes),
        query_starts=Tensor(starts[0]),
        key_starts=Tensor(starts[1]),
        layout="thd",
        return_lse=True,
    )
    assert out.shape == (11, 4, 8) and lse.shape == (4, 11)
    for n in range(len(lengths)):
        i, j = (slice(int(s[n]), int(s[n + 1])) for s in starts)
        alone = attention(
            Tensor(q[i]),
            Tensor(k[j]),
            Tensor(v[j]),
            causal=True,
            window=3,
            slopes=Tensor(slopes),
            layout="thd",
        )
        np.testing.assert_allclose(out.numpy()[i], alone.numpy(), atol=2e-6)
    assert not out.numpy()[5 + lengths[3][0] + 4 :].any()
    assert (lse.numpy()[:, 3:5] == -np.inf).all()  # a sequence with queries and no keys


def test_rows_that_see_nothing_have_no_nan() -> None:
    q, k, v = (Tensor(x) for x in (Q, K, V))
    bias = np.zeros((1, 4, 3, 3), np.float32)
    bias[:, :2, 1] = -np.inf
    b = Tensor(bias)
    for x in (q, k, v, b):
        x.requires_grad = True
    out, lse = attention(q, k, v, bias=b, return_lse=True)
    assert not out.numpy()[:, :2, 1].any() and (lse.numpy()[:, :2, 1] == -np.inf).all()
    out.square().sum().backward()
    for x in (q, k, v, b):
        assert np.isfinite(x.grad.numpy()).all()
    assert not q.grad.numpy()[:, :2, 1].any()


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (1, 1), (0, 0), (1, 4)])
def test_lengths_of_0_and_1(queries: int, keys: int) -> None:
    q, k, v = (Tensor(random_array((2, 4, t, 8), t)) for t in (queries, keys, keys))
    for x in (q, k, v):
        x.requires_grad = True
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == (2, 4, queries, 8) and lse.shape == (2, 4, queries)
    if keys == 0:
        assert not out.numpy().any() and (lse.numpy() == -np.inf).all()
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad is None or np.isfinite(x.grad.numpy()).all()


def test_large_scores() -> None:
    q, k, v = (Tensor(x) for x in (Q * 200, K * 200, V))
    found = attention(q, k, v).numpy()
    wide = defined(*(torch.tensor(np.asarray(x.numpy(), np.float64)) for x in (q, k, v)))[0]
    np.testing.assert_allclose(found, wide.numpy(), atol=2e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_near_float64(dtype: str) -> None:
    arrays = [random_array((1, 4, 32, 16), i) for i in range(3)]
    low = [Tensor(x).to(dtype) for x in arrays]
    for x in low:
        x.requires_grad = True
    out = attention(*low, causal=True)
    (out.float() * Tensor(random_array(out.shape, 9))).sum().backward()
    wide = [
        torch.tensor(x.detach().float().numpy().astype(np.float64), requires_grad=True) for x in low
    ]
    wanted = functional.scaled_dot_product_attention(*wide, is_causal=True)
    (wanted * torch.tensor(random_array(out.shape, 9))).sum().backward()
    step = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(out.float().numpy(), wanted.detach().numpy(), atol=3 * step)
    for mine, peer in zip(low, wide):
        scale = float(peer.grad.abs().max())
        np.testing.assert_allclose(
            mine.grad.float().numpy(), peer.grad.numpy(), atol=4 * step * scale
        )


# ---- dropout ----------------------------------------------------------------------------------


def test_dropout_keeps_the_mean_and_its_gradient_sees_the_same_mask() -> None:
    manual_seed(3)
    q, k = (Tensor(random_array((1, 2, 64, 8), i)) for i in (0, 1))
    v = Tensor(np.broadcast_to(np.eye(64, dtype=np.float32), (1, 2, 64, 64)).copy())
    v.requires_grad = True
    out = attention(q, k, v, dropout=0.25)
    weights = random_array((1, 2, 64, 64), 5)
    (out * Tensor(weights)).sum().backward()
    p = out.detach().numpy()  # v is the identity: out is the probabilities after dropout
    np.testing.assert_allclose(v.grad.numpy(), np.swapaxes(p, -1, -2) @ weights, atol=1e-5)
    whole = attention(q, k, v).detach().numpy()
    kept = p != 0
    np.testing.assert_allclose(p[kept], whole[kept] / 0.75, rtol=1e-5)
    assert abs(kept.mean() - 0.75) < 0.02


def test_dropout_of_everything_and_under_vmap() -> None:
    q = Tensor(Q)
    assert not attention(q, q, q, dropout=1.0).numpy().any()
    manual_seed(5)
    same = Tensor(np.broadcast_to(Q[0], (3, 4, 3, 8)).copy())
    found = vmap(lambda x: attention(x, x, x, dropout=0.5, layout="htd"))(same).numpy()
    assert not np.allclose(found[0], found[1])  # every example draws bits of its own


# ---- transforms -------------------------------------------------------------------------------


def test_vmap_is_a_loop() -> None:
    q, k, v = (random_array((3, 2, 4, 5, 8), i) for i in range(3))
    bias = random_array((3, 4, 1, 5), 3)
    for share in ({}, {"slopes": Tensor(random_array((4,), 6))}):
        run = vmap(lambda q, k, v, b: attention(q, k, v, bias=b, causal=True, **share))  # noqa: B023
        found = run(*(Tensor(x) for x in (q, k, v, bias))).numpy()
        for i in range(3):
            one = attention(
                *(Tensor(x[i]) for x in (q, k, v)), bias=Tensor(bias[i]), causal=True, **share
            )
            np.testing.assert_allclose(found[i], one.numpy(), atol=2e-6)


def test_gradients_under_vmap_and_jit() -> None:
    q, k = random_array((3, 2, 5, 8)), random_array((1, 5, 8), 1)

    def loss(q, k):
        return attention(q, k, k, layout="htd", causal=True).square().sum()

    found = jit(vmap(grad(loss), (0, None)))(Tensor(q), Tensor(k)).numpy()
    for i in range(3):
        one = grad(loss)(Tensor(q[i]), Tensor(k)).numpy()
        np.testing.assert_allclose(found[i], one, atol=1e-5)


def test_second_derivatives() -> None:
    arrays = [np.random.default_rng(i).standard_normal((1, 2, 3, 4)) for i in range(3)]
    bias = np.random.default_rng(4).standard_normal((1, 2, 3, 3))
    options = {"softcap": 2.0}

    def ours(q, k, v, b):
        return attention(q, k, v, bias=b, **options).square().sum()

    def slope(q, k, v, b):
        parts = grad(ours, (0, 1, 2, 3))(q, k, v, b)
        return sum((p * p).sum() for p in parts)

    found = grad(slope, (0, 1, 2, 3))(*(Tensor(x) for x in (*arrays, bias)))
    peers = [torch.tensor(x, requires_grad=True) for x in (*arrays, bias)]
    value = defined(*peers[:3], bias=peers[3], **options)[0].square().sum()
    parts = torch.autograd.grad(value, peers, create_graph=True)
    wanted = torch.autograd.grad(sum((p * p).sum() for p in parts), peers)
    for a, b in zip(found, wanted):
        close(a, b, 1e-8)


def test_forward_mode() -> None:
    q, k, v, t = (np.random.default_rng(i).standard_normal((1, 2, 3, 4)) for i in range(4))
    _, moved = tilegrad.jvp(
        lambda x: attention(x, Tensor(k), Tensor(v), causal=True), (Tensor(q),), (Tensor(t),)
    )
    ends = [
        attention(Tensor(q + s * 1e-5 * t), Tensor(k), Tensor(v), causal=True).numpy()
        for s in (1, -1)
    ]
    np.testing.assert_allclose(moved.numpy(), (ends[0] - ends[1]) / 2e-5, atol=1e-8)


def test_jit_with_symbolic_lengths() -> None:
    run = jit(lambda q, k, v: attention(q, k, v, causal="bottom_right"))
    for queries, keys in ((3, 5), (4, 4), (1, 6)):
        q, k, v = (random_array((2, 2, t, 8), t) for t in (queries, keys, keys))
        wanted = defined(*(torch.tensor(x) for x in (q, k, v)), high=keys - queries)[0]
        close(run(Tensor(q), Tensor(k), Tensor(v)), wanted)


def test_a_layer_that_shows_no_weights_gives_the_same() -> None:
    layer = nn.MultiheadAttention(16, 4, batch_first=True)
    x = Tensor(random_array((2, 5, 16)))
    shown, weights = layer(x, x, x, is_causal=True)
    hidden, nothing = layer(x, x, x, is_causal=True, need_weights=False)
    assert weights.shape == (2, 5, 5) and nothing is None
    np.testing.assert_allclose(hidden.detach().numpy(), shown.detach().numpy(), atol=1e-5)


# ---- errors -----------------------------------------------------------------------------------

WRONG = [
    ({"layout": "bhdt"}, UserError, "attention: not a layout"),
    ({"layout": "htd"}, ShapeError, "q has not the axes of the layout"),
    ({"causal": "left"}, UserError, "causal is not known"),
    ({"window": 0}, UserError, "not a window"),
    ({"window": (1, -1)}, UserError, "not a window"),
    ({"softcap": -1.0}, UserError, "softcap is not a number from 0"),
    ({"dropout": 1.5}, ShapeError, "not a probability"),
    ({"bias": Q}, ShapeError, "bias does not fit"),
    ({"bias": np.ones((3, 3), bool)}, DTypeError, "bias has another dtype"),
    ({"mask": np.zeros((3, 3), np.float32)}, DTypeError, "mask has another dtype"),
    ({"mask": np.zeros((3, 2), bool)}, ShapeError, "mask does not fit"),
    ({"slopes": np.zeros(3, np.float32)}, ShapeError, "slopes does not fit"),
    ({"sinks": np.zeros(4, np.int32)}, DTypeError, "sinks has another dtype"),
    ({"key_lengths": np.zeros(3, np.int32)}, ShapeError, "key_lengths does not fit"),
    ({"query_starts": np.zeros(3, np.int32)}, UserError, "go together"),
    (
        {"query_starts": np.zeros(3, np.int32), "key_starts": np.zeros(3, np.int32)},
        ShapeError,
        "packed sequences lie in one batch entry",
    ),
]


@pytest.mark.parametrize(("options", "kind", "text"), WRONG, ids=[w[2] for w in WRONG])
def test_wrong_options(options, kind, text) -> None:
    tensors = {n: Tensor(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    with pytest.raises(kind, match=text):
        attention(Tensor(Q), Tensor(K), Tensor(V), **tensors)


def test_wrong_packed_options() -> None:
    x = Tensor(Q[0].swapaxes(0, 1).copy())  # (3, 4, 8)
    starts = Tensor(np.array([0, 1, 3], np.int32))
    with pytest.raises(UserError, match="no common end"):
        attention(
            x, x, x, query_starts=starts, key_starts=starts, causal="bottom_right", layout="thd"
        )
    with pytest.raises(UserError, match="lengths in the starts"):
        attention(
            x,
            x,
            x,
            query_starts=starts,
            key_starts=starts,
            layout="thd",
            key_lengths=Tensor(np.array([3], np.int32)),
        )
    with pytest.raises(ShapeError, match="key_starts does not fit"):
        attention(x, x, x, query_starts=starts, key_starts=starts[:2], layout="thd")


def test_wrong_inputs() -> None:
    q, k = Tensor(Q), Tensor(K)
    with pytest.raises(DTypeError, match="the dtypes differ"):
        attention(q, k.to("bfloat16"), k)
    with pytest.raises(DTypeError, match="needs floats"):
        attention(q.long(), k.long(), k.long())
    with pytest.raises(ShapeError, match="attention: the shapes do not fit"):
        attention(q, k[..., :4], k)
    with pytest.raises(ShapeError, match="the heads do not divide"):
        attention(q, k[:, :3], k[:, :3])
    with pytest.raises(UserError, match="attn_mask and is_causal"):
        scaled_dot_product_attention(q, k, k, q, 0.0, True)
    with pytest.raises(ShapeError, match="the heads differ"):
        scaled_dot_product_attention(q, k[:, :2], k[:, :2])
    for wrong in ((2, 4, 3, 2), (1, 1, 1, 1, 1)):
        with pytest.raises(ShapeError, match="attn_mask does not fit"):
            scaled_dot_product_attention(q, k, k, Tensor(random_array(wrong)))
    with pytest.raises(DTypeError, match="a mask is bool or float"):
        scaled_dot_product_attention(q, k, k, Tensor(np.ones((3, 3), np.int32)))
