"""Names that PyTorch users reach for: each is compared with torch, values and gradients, or is
refused with a word."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from torch_peer import torch

import tilegrad as tg
import tilegrad.nn.functional as F
from tilegrad import nn
from tilegrad.core.errors import DTypeError, ShapeError, UserError

RNG = np.random.default_rng(0)


def numbers(*shape: int, low: float = -3.0, high: float = 3.0) -> np.ndarray:
    return RNG.uniform(low, high, shape).astype(np.float32)


A, B, C = numbers(4, 6), numbers(4, 6), numbers(6)
CUBE, IMAGE, GRID = numbers(3, 4, 5), numbers(2, 3, 5, 6), numbers(2, 4, 3, 2, low=-1.3, high=1.3)
INDEX = np.array([3, 0, 3, 1])
LINE = np.array([1, 1, 2, 2, 2, 3, 1, 1], np.float32)

# name, positional arguments, named arguments: called as tg.name and torch.name.
FUNCTIONS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("clamp_min", (A, 0.5), {}), ("clamp_max", (A, 0.5), {}), ("rsub", (A, B), {"alpha": 2}),
    ("fill", (A, 2.5), {}), ("scalar_tensor", (2.5,), {}), ("flip", (A,), {"dims": (0, 1)}),
    ("diff", (A,), {}), ("diff", (A,), {"n": 2, "dim": 0}),
    ("diff", (A,), {"prepend": B[:, :2], "append": B[:, :1]}), ("diff", (LINE > 1,), {}),
    ("cross", (numbers(4, 3), numbers(4, 3)), {}), ("cross", (numbers(3, 3), numbers(3, 3)), {}),
    ("lgamma", (numbers(64, low=-6, high=40),), {}),
    ("digamma", (numbers(64, low=0.05, high=40),), {}),
    ("xlogy", (np.abs(A), np.abs(B)), {}), ("xlogy", (2.0, np.abs(B)), {}),
    ("logaddexp2", (A, B), {}), ("sinc", (A,), {}),
    ("heaviside", (np.float32([-1, 0, 2, math.nan]), np.float32([0.5, 0.5, 0.5, 0.5])), {}),
    ("isposinf", (np.float32([1, math.inf, -math.inf, math.nan]),), {}),
    ("isneginf", (np.float32([1, math.inf, -math.inf, math.nan]),), {}),
    ("isposinf", (INDEX,), {}),
    ("index_put", (A, (np.array([3, 0]),), C), {}),
    ("index_put", (A, (INDEX, INDEX), numbers(4)), {"accumulate": True}),
    ("index_reduce", (A, 0, INDEX, B, "amax"), {}),
    ("index_reduce", (A, 0, INDEX, B, "prod"), {"include_self": False}),
    ("index_reduce", (A, 0, INDEX, B, "mean"), {}),
    ("select_scatter", (A, C, 0, 2), {}), ("select_scatter", (A, A[:, 0], 1, -1), {}),
    ("slice_scatter", (A, B[:2]), {"start": 1, "end": 3}),
    ("slice_scatter", (A, B[:, :3]), {"dim": 1, "start": 0, "end": 6, "step": 2}),
    ("diagonal_scatter", (A, numbers(4)), {}),
    ("diagonal_scatter", (A, numbers(3)), {"offset": -1}),
    ("diagonal_scatter", (CUBE, numbers(5, 3)), {"dim1": 0, "dim2": 1}),
    ("atleast_1d", (np.float32(3),), {}), ("atleast_2d", (C,), {}), ("atleast_3d", (A,), {}),
    ("atleast_3d", (C,), {}),
    ("hsplit", (A, 3), {}), ("hsplit", (C, [2, 4]), {}), ("vsplit", (A, 2), {}),
    ("dsplit", (CUBE, 5), {}), ("column_stack", ([C, numbers(6, 2)],), {}),
    ("tensor_split", (A, torch.tensor([1, 3])), {"dim": 1}), ("tensor_split", (A, 3), {}),
    ("searchsorted", (np.sort(C)[::-1].copy(), A), {"sorter": np.arange(5, -1, -1)}),
    ("unique_consecutive", (LINE,), {"return_inverse": True, "return_counts": True}),
    ("unique_consecutive", (np.repeat(A, 2, 0),), {"dim": 0}),
    ("histc", (A,), {"bins": 5}), ("histc", (A,), {"bins": 7, "min": -1, "max": 2}),
    ("cdist", (A, numbers(3, 6)), {}), ("cdist", (CUBE, numbers(3, 2, 5)), {"p": 1.0}),
    ("cdist", (A, A), {"p": math.inf}), ("dist", (A, B), {}), ("dist", (A, B), {"p": 3.0}),
    ("addr", (A, numbers(4), C), {"beta": 0.5, "alpha": 2.0}),
    ("addbmm", (numbers(4, 2), CUBE, numbers(3, 5, 2)), {"beta": 0.5, "alpha": 2.0}),
    ("as_strided", (A, (3, 3), (7, 2), 1), {}), ("as_strided", (A, (2, 2, 2), (1, 0, 6)), {}),
]  # fmt: skip
WITHOUT_GRADIENT = {
    "heaviside",
    "isposinf",
    "isneginf",
    "histc",
    "unique_consecutive",
    "searchsorted",
    "fill",
    "scalar_tensor",
}


def ours(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return tg.tensor(np.asarray(value))
    if isinstance(value, torch.Tensor):
        return tg.tensor(value.numpy())
    return type(value)(ours(v) for v in value) if isinstance(value, (list, tuple)) else value


def theirs(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return torch.tensor(np.asarray(value))
    return type(value)(theirs(v) for v in value) if isinstance(value, (list, tuple)) else value


def flat(value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value]
    return [v for part in value for v in flat(part)]


def same(found: Any, expected: Any, loose: float = 1e-5) -> None:
    for a, b in zip(flat(found), flat(expected), strict=True):
        assert tuple(a.shape) == tuple(b.shape) and str(a.dtype) == str(b.dtype).split(".")[1]
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=loose, atol=loose)


def gradients(leaves: list[Any], results: list[Any]) -> list[Any]:
    total = sum((r * r).sum() for r in results)
    total.backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize(
    "name, args, options", FUNCTIONS, ids=[f"{i}-{f[0]}" for i, f in enumerate(FUNCTIONS)]
)
def test_functions(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    a = [ours(v) for v in args]
    b = [theirs(v) for v in args]
    named = {k: ours(v) for k, v in options.items()}, {k: theirs(v) for k, v in options.items()}
    mine = [v for v in flat(a) if isinstance(v, tg.Tensor) and v.dtype.is_float]
    other = [v for v in flat(b) if isinstance(v, torch.Tensor) and v.is_floating_point()]
    differs = name not in WITHOUT_GRADIENT and bool(mine)
    for leaf in [*mine, *other] if differs else []:
        leaf.requires_grad = True
    found = flat(getattr(tg, name)(*a, **named[0]))
    expected = flat(getattr(torch, name)(*b, **named[1]))
    same(found, expected)
    if differs and all(r.dtype.is_float for r in found):
        for x, y in zip(gradients(mine, found), gradients(other, expected)):
            same(x, y, 1e-4)


METHODS: list[tuple[str, tuple[Any, ...]]] = [
    ("clamp_min", (0.1,)),
    ("clamp_max", (0.1,)),
    ("diff", ()),
    ("lgamma", ()),
    ("sinc", ()),
    ("xlogy", (np.abs(B),)),
    ("sum_to_size", (1, 6)),
    ("sum_to_size", (6,)),
    ("hsplit", (2,)),
    ("vsplit", (2,)),
    ("dist", (B,)),
    ("isposinf", ()),
    ("fill", (3.0,)),
    ("stride", ()),
    ("stride", (1,)),
    ("index_put", ((INDEX,), C)),
    ("cross", (np.roll(A, 1, 0),)),
]


@pytest.mark.parametrize("name, args", METHODS, ids=[f"{i}-{m[0]}" for i, m in enumerate(METHODS)])
def test_methods(name: str, args: tuple[Any, ...]) -> None:
    value = A[:, :3].copy() if name == "cross" else A
    args = tuple(a[:, :3].copy() if name == "cross" else a for a in args)
    if name == "fill":  # PyTorch has the function and the method in place
        same(ours(value).fill(*args), torch.fill(theirs(value), *args))
        return
    found = getattr(ours(value), name)(*[ours(a) for a in args])
    expected = getattr(theirs(value), name)(*[theirs(a) for a in args])
    assert found == expected if name == "stride" else same(found, expected) is None


def test_in_place() -> None:
    x, y = ours(A.copy()), theirs(A.copy())
    x.clamp_min_(0.0).index_put_((ours(INDEX),), ours(C))
    y.clamp_min_(0.0).index_put_((theirs(INDEX),), theirs(C))
    same(x, y)


def test_frombuffer() -> None:
    data = bytearray(np.arange(6, dtype=np.float32).tobytes())
    same(
        tg.frombuffer(data, dtype=tg.float32, count=3, offset=8),
        torch.frombuffer(data, dtype=torch.float32, count=3, offset=8),
    )
    with pytest.raises(ShapeError, match="does not fit"):
        tg.frombuffer(data[:7], dtype=tg.float32)


# ---- nn ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("corners", [False, True])
def test_grid_sample(mode: str, padding: str, corners: bool) -> None:
    x, g = ours(IMAGE), ours(GRID)
    y, h = theirs(IMAGE), theirs(GRID)
    for leaf in (x, g, y, h):
        leaf.requires_grad = True
    found = F.grid_sample(x, g, mode, padding, corners)
    expected = torch.nn.functional.grid_sample(y, h, mode, padding, corners)
    same(found, expected, 1e-4)
    for a, b in zip(gradients([x], [found]), gradients([y], [expected])):
        same(a, b, 1e-3)


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 1, 3, 2, 4)])
def test_affine_grid(size: tuple[int, ...], corners: bool) -> None:
    theta = numbers(2, len(size) - 2, len(size) - 1)
    same(
        F.affine_grid(ours(theta), size, corners),
        torch.nn.functional.affine_grid(theirs(theta), list(size), corners),
        1e-4,
    )


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("offsets", [None, [0, 2, 2, 5]])
@pytest.mark.parametrize("padding", [None, 1])
def test_embedding_bag(mode: str, offsets: list[int] | None, padding: int | None) -> None:
    index = RNG.integers(0, 7, (3, 4) if offsets is None else 9)
    table = numbers(7, 5)
    given = None if offsets is None else np.array(offsets)
    w, v = ours(table), theirs(table)
    w.requires_grad = v.requires_grad = True
    found = F.embedding_bag(ours(index), w, ours(given), mode, padding_idx=padding)
    expected = torch.nn.functional.embedding_bag(
        theirs(index), v, theirs(given), mode=mode, padding_idx=padding
    )
    same(found, expected)
    (a,), (b,) = gradients([w], [found]), gradients([v], [expected])
    same(a, b)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("one_line", [False, True])
def test_ctc_loss(reduction: str, one_line: bool) -> None:
    rows = np.array([[1, 2, 2, 3], [3, 1, 0, 0], [2, 2, 2, 0]])
    sizes, frames = np.array([4, 2, 3]), np.array([12, 9, 10])
    if one_line:
        rows = np.concatenate([row[:n] for row, n in zip(rows, sizes)])
    logits = numbers(12, 3, 5)
    x, y = ours(logits), theirs(logits)
    x.requires_grad = y.requires_grad = True
    found = F.ctc_loss(
        x.log_softmax(-1), ours(rows), ours(frames), ours(sizes), reduction=reduction
    )
    expected = torch.nn.functional.ctc_loss(
        y.log_softmax(-1), theirs(rows), theirs(frames), theirs(sizes), reduction=reduction
    )
    same(found, expected, 1e-4)
    (a,), (b,) = gradients([x], [found]), gradients([y], [expected])
    same(a, b, 1e-3)
    layer = nn.CTCLoss(reduction=reduction)
    same(layer(x.log_softmax(-1), ours(rows), ours(frames), ours(sizes)), expected, 1e-4)


def test_ctc_loss_of_what_cannot_be() -> None:
    x = tg.zeros(2, 1, 3).log_softmax(-1)
    target, frames, sizes = tg.tensor([[1, 1, 2]]), tg.tensor([2]), tg.tensor([3])
    assert F.ctc_loss(x, target, frames, sizes).item() == math.inf
    assert F.ctc_loss(x, target, frames, sizes, zero_infinity=True).item() == 0.0


def test_gumbel_softmax() -> None:
    tg.manual_seed(0)
    logits = tg.tensor(np.log([0.1, 0.2, 0.7]).astype(np.float32)).expand(4000, 3)
    drawn = F.gumbel_softmax(logits, hard=True)
    assert set(np.unique(drawn.numpy().round(5))) <= {0.0, 1.0}
    np.testing.assert_allclose(drawn.mean(0).numpy(), [0.1, 0.2, 0.7], atol=0.03)
    np.testing.assert_allclose(F.gumbel_softmax(logits, 0.5).sum(1).numpy(), 1.0, rtol=1e-5)


def with_weights_of(mine: Any, other: Any) -> Any:
    mine.load_state_dict({k: v.detach().numpy() for k, v in other.state_dict().items()})
    return mine


@pytest.mark.parametrize("name", ["RNNCell", "LSTMCell", "GRUCell"])
@pytest.mark.parametrize("bias", [True, False])
def test_cells(name: str, bias: bool) -> None:
    other = getattr(torch.nn, name)(5, 7, bias=bias)
    mine = with_weights_of(getattr(nn, name)(5, 7, bias=bias), other)
    x, states = numbers(3, 5), [numbers(3, 7) for _ in range(2)]
    state = [
        tuple(f(s) for s in states) if name == "LSTMCell" else f(states[0]) for f in (ours, theirs)
    ]
    same(mine(ours(x)), other(theirs(x)))
    same(mine(ours(x), state[0]), other(theirs(x), state[1]))


@pytest.mark.parametrize("first", [False, True])
def test_transformer_decoder(first: bool) -> None:
    options = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True, "norm_first": first}
    layer = torch.nn.TransformerDecoderLayer(8, 2, **options)
    other = torch.nn.TransformerDecoder(layer, 2, torch.nn.LayerNorm(8)).eval()
    mine = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, **options), 2, nn.LayerNorm(8))
    mine = with_weights_of(mine, other).eval()
    x, memory = numbers(2, 5, 8), numbers(2, 4, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    same(mask, torch.nn.Transformer.generate_square_subsequent_mask(5))
    same(
        mine(ours(x), ours(memory), mask),
        other(theirs(x), theirs(memory), torch.tensor(mask.numpy())),
        1e-4,
    )


def test_transformer() -> None:
    options = {
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "dim_feedforward": 16,
        "dropout": 0.0,
        "batch_first": True,
    }
    other = torch.nn.Transformer(8, 2, **options).eval()
    mine = with_weights_of(nn.Transformer(8, 2, **options), other).eval()
    x, y = numbers(2, 5, 8), numbers(2, 4, 8)
    same(mine(ours(x), ours(y)), other(theirs(x), theirs(y)), 1e-4)


def test_embedding_bag_layer_and_upsampling() -> None:
    bag = nn.EmbeddingBag(7, 3, mode="sum")
    index = np.array([[1, 2], [0, 6]])
    same(
        bag(ours(index)),
        torch.nn.functional.embedding_bag(
            theirs(index), torch.tensor(bag.weight.numpy()), mode="sum"
        ),
    )
    for name in ("UpsamplingNearest2d", "UpsamplingBilinear2d"):
        same(
            getattr(nn, name)(scale_factor=2)(ours(IMAGE)),
            getattr(torch.nn, name)(scale_factor=2)(theirs(IMAGE)),
            1e-4,
        )
    same(
        F.upsample(ours(IMAGE), size=(7, 9)),
        torch.nn.functional.interpolate(theirs(IMAGE), size=(7, 9)),
    )


def test_functional_call() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = tg.tensor(numbers(5, 3))
    before = model(x).numpy().copy()
    twice = {name: p.detach() * 2 for name, p in model.named_parameters()}
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    other.load_state_dict({k: torch.tensor(v.numpy()) for k, v in twice.items()})
    same(nn.functional_call(model, twice, x), other(torch.tensor(x.numpy())))
    np.testing.assert_array_equal(model(x).numpy(), before)
    slope = tg.grad(lambda p: nn.functional_call(model, p, (x,)).sum())(twice)
    assert set(slope) == set(twice) and slope["2.bias"].tolist() == [5.0, 5.0]
    with pytest.raises(UserError, match="no such parameter"):
        nn.functional_call(model, {"2.wait": x}, x)


# ---- gradients -----------------------------------------------------------------------------


def test_hooks_and_retained_gradients() -> None:
    seen = []
    for make in (tg.tensor, torch.tensor):
        x = make([1.0, 2.0], requires_grad=True)
        y = x * 3
        y.retain_grad()
        z = y * y
        handle = y.register_hook(lambda g: g * 10)
        gone = y.register_hook(lambda g: g * 1000)
        gone.remove()
        kept = []
        x.register_hook(kept.append)
        z.sum().backward()
        handle.remove()
        seen.append((x.grad.tolist(), y.grad.tolist(), kept[0].tolist()))
    assert seen[0] == seen[1]
    with pytest.raises(tg.StateError, match="no gradient"):
        tg.ones(3).register_hook(print)


def test_grad_modes() -> None:
    x = tg.ones(2, requires_grad=True)
    with tg.inference_mode():
        assert not (x * 2).requires_grad
        with tg.enable_grad():
            assert (x * 2).requires_grad


def test_vmap_by_pytorchs_names() -> None:
    x, y = numbers(3, 4), numbers(4)
    found = tg.vmap(lambda a, b: a * b, in_dims=(0, None), out_dims=1)(ours(x), ours(y))
    expected = torch.vmap(lambda a, b: a * b, in_dims=(0, None), out_dims=1)(theirs(x), theirs(y))
    same(found, expected)


# ---- facts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_finfo(name: str) -> None:
    mine, other = tg.finfo(getattr(tg, name)), torch.finfo(getattr(torch, name))
    for fact in ("bits", "eps", "max", "min", "tiny", "smallest_normal"):
        assert getattr(mine, fact) == getattr(other, fact), fact


def test_iinfo_and_types() -> None:
    for name in ("uint8", "int8", "int16", "int32", "int64"):
        mine, other = tg.iinfo(getattr(tg, name)), torch.iinfo(getattr(torch, name))
        assert (mine.bits, mine.min, mine.max) == (other.bits, other.min, other.max)
    assert tg.float is tg.float32 and tg.int is tg.int32 and tg.bool is tg.bool_
    assert tg.device("cpu") == "cpu" and tg.get_default_dtype() is tg.float32
    with pytest.raises(DTypeError):
        tg.finfo(tg.int32)
    tg.set_default_dtype(tg.float32)
    with pytest.raises(UserError, match="always float32"):
        tg.set_default_dtype(tg.float64)


def test_dir_shows_what_is_public() -> None:
    shown = dir(tg)
    assert {"Tensor", "jit", "nn", "linalg", "optim", "float", "lgamma", "LLM"} <= set(shown)
    for name in shown:
        assert not name.startswith("_") or name == "__version__"
        assert getattr(tg, name) is not None
    assert not {"import_module", "Any", "LAZY", "FOLDERS", "BUILTINS"} & set(shown)


ADDED = {"bias_k": numbers(1, 1, 8), "bias_v": numbers(1, 1, 8)}
SEPARATE = {
    "use_separate_proj_weight": True,
    "in_proj_weight": None,
    "q_proj_weight": numbers(8, 8),
    "k_proj_weight": numbers(8, 8),
    "v_proj_weight": numbers(8, 8),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        ADDED,
        {"add_zero_attn": True},
        SEPARATE,
        {"in_proj_bias": None, "out_proj_bias": None},
        {"dropout_p": 0.9, "training": False},
        {
            **ADDED,
            "add_zero_attn": True,
            "key_padding_mask": np.eye(2, 4, 1) > 0,
            "attn_mask": np.eye(3, 4) > 0,
        },
        {"attn_mask": numbers(4, 3, 4), "need_weights": False},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_multi_head_attention_forward(options: dict[str, Any]) -> None:
    given = {
        "query": numbers(3, 2, 8),
        "key": numbers(4, 2, 8),
        "value": numbers(4, 2, 8),
        "embed_dim_to_check": 8,
        "num_heads": 2,
        "in_proj_weight": numbers(24, 8) / 3,
        "in_proj_bias": numbers(24),
        "bias_k": None,
        "bias_v": None,
        "add_zero_attn": False,
        "dropout_p": 0.0,
        "out_proj_weight": numbers(8, 8),
        "out_proj_bias": numbers(8),
        **options,
    }
    given = {
        k: v.astype(np.float64) if isinstance(v, np.ndarray) and v.dtype == np.float32 else v
        for k, v in given.items()
    }
    leaves, results = [], []
    for make, home in ((ours, F), (theirs, torch.nn.functional)):
        arguments = {k: make(v) for k, v in given.items()}
        leaves.append(
            [v for k, v in arguments.items() if hasattr(v, "backward") and not k.endswith("mask")]
        )
        for leaf in leaves[-1]:
            leaf.requires_grad = True
        found = home.multi_head_attention_forward(**arguments)
        results.append([r for r in found if r is not None])
    same(results[0], results[1], 1e-9)
    for a, b in zip(gradients(leaves[0], results[0]), gradients(leaves[1], results[1])):
        same(a, b, 1e-8)


def test_multi_head_attention_forward_refuses() -> None:
    x, w, v = tg.ones(3, 8), tg.ones(24, 8), tg.ones(8, 8)
    rest = (w, None, None, None, False, 0.0, v, None)
    assert F.multi_head_attention_forward(x, x, x, 8, 2, *rest)[1].shape == (3, 3)
    with pytest.raises(UserError, match="static_k"):
        F.multi_head_attention_forward(x, x, x, 8, 2, *rest, static_k=x)
    with pytest.raises(UserError, match="bias_k and bias_v"):
        F.multi_head_attention_forward(x, x, x, 8, 2, w, None, x, *rest[3:])
    with pytest.raises(UserError, match="do not divide into heads"):
        F.multi_head_attention_forward(x, x, x, 8, 3, *rest)
    with pytest.raises(ShapeError, match="the queries do not fit"):
        F.multi_head_attention_forward(x, x, x, 6, 2, *rest)


def test_sums_of_integers_down_to_a_size() -> None:
    for dtype in (np.int8, np.int32, np.bool_):
        array = np.ones((2, 3), dtype)
        for size in ((2, 3), (3,), (1, 3), (2, 1), ()):
            same(ours(array).sum_to_size(size), theirs(array).sum_to_size(size))


SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 40.0, -40.0, 1e-30, -1e-30, 3e38, np.inf, -np.inf, np.nan],
    np.float32,
)
ONE = ["lgamma", "digamma", "isposinf", "isneginf", "erfinv", "nan_to_num", "exp2", "frac"]
TWO = [
    "xlogy",
    "logaddexp",
    "logaddexp2",
    "heaviside",
    "copysign",
    "fmin",
    "fmax",
    "hypot",
    "atan2",
]


@pytest.mark.parametrize("name", [*ONE, *TWO])
def test_special_values(name: str) -> None:
    """Poles, infinities, nan, and every pair of them."""
    args = (SPECIAL,) if name in ONE else (SPECIAL[:, None], SPECIAL[None])
    found = getattr(tg, name)(*[tg.tensor(a) for a in args]).numpy()
    expected = getattr(torch, name)(*[torch.tensor(a) for a in args]).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "bad",
    [
        lambda m, t: m.histc(t([1.0, math.nan]), 3),
        lambda m, t: m.histc(t([1.0, math.inf]), 3),
        lambda m, t: m.histc(t([1.0]), 3, 0, math.inf),
        lambda m, t: m.tensor_split(t([1.0]), 0),
        lambda m, t: m.tensor_split(t([1.0]), -1),
    ],
)
def test_what_torch_refuses(bad: Any) -> None:
    with pytest.raises(RuntimeError):
        bad(torch, torch.tensor)
    with pytest.raises(UserError):
        bad(tg, tg.tensor).numpy()


@pytest.mark.parametrize("given", [False, True])
def test_histc_of_a_range_past_the_largest_number(given: bool) -> None:
    """As PyTorch counts the same numbers in float64 (in float32 its own range is inf)."""
    x = np.array([-2e38, 2e38, 0, 1e38, -1e38, 1e37], np.float32)
    limits = [float(x[0]), float(x[1])] if given else []
    for bins in (4, 5, 100):
        expected = torch.histc(torch.tensor(x).double(), bins, *limits)
        assert tg.histc(tg.tensor(x), bins, *limits).tolist() == expected.tolist()
