"""What text the compiler emits for many functions and Targets, as hashes: did a change change code?

    python bench/emitted.py --write before.json       the hashes of this tree
    python bench/emitted.py --against before.json     what differs from them; status 1 if any does
    python bench/emitted.py --only attention          cases whose name has this word
    python bench/emitted.py --show "softmax h200"     the text of one case, for a diff

Equal texts count once: it is no difference that two Bodies became one.
No GPU is needed, and nothing runs. A kernel that is only written otherwise gives the same text;
then it is as right and as fast as before.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tilegrad as tg
from tilegrad import nn
from tilegrad.compiler.compile import schedule_for
from tilegrad.core.dtype import DType
from tilegrad.core.format import Q4_0, Q4_1, QUANTISED, Format, format_of
from tilegrad.core.target import A100, AVX2, AVX512, AVX512_AMX, H200, NEON, Target
from tilegrad.generate.sampling import SamplingState, Variant
from tilegrad.generate.step import Rows, step
from tilegrad.ir.symbol import symbol
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.nn import functional as F
from tilegrad.quant.calibrate import put
from tilegrad.quant.layers import PackedLinear
from tilegrad.runtime.language import language_of
from tilegrad.runtime.limits import limits_of
from tilegrad.schedule.schedule import Launch, Schedule
from tilegrad.tensor.stored import stored

GPUS = (H200, A100)
CPUS = (AVX512_AMX.with_cores(8), AVX512.with_cores(8), AVX2.with_cores(8), NEON.with_cores(8))
ALL = (*GPUS, *CPUS)
DRAWS = Variant(draws=True, penalties=True, bias=True, logprobs=3)
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SMALL = {**LLAMA, "vocab_size": 4096, "hidden_size": 576, "intermediate_size": 1536}
SMALL |= {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
EVEN = {**SMALL, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
EXPERTS = {**LLAMA, "model_type": "qwen3_moe", "vocab_size": 4096, "hidden_size": 2048}
EXPERTS |= {"num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768}
EXPERTS |= {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}

ROUNDED = tuple(
    (format_of(form), inputs)
    for form, inputs in (
        ("E4M3_ROW_F32", "E4M3_ROW_F32"),
        ("INT8_ROW_F32", "INT8_ROW_F32"),
        ("E4M3_128X128_F32", "E4M3_G128_F32"),
    )
)

Traced = Callable[[Target], Any]  # what `jit.lower` gives


# ---- what is compiled ---------------------------------------------------------------------------


def of(*shape: int, dtype: Any = tg.bfloat16) -> tg.Tensor:
    """An argument."""
    return tg.zeros(*shape, dtype=dtype)


def whole(*shape: int) -> tg.Tensor:
    """An argument of whole numbers."""
    return tg.zeros(*shape, dtype=tg.int64)


def plain(function: Callable[..., Any], *args: Any) -> Traced:
    """A function of Tensors."""
    return lambda target: tg.jit(function).lower(*args)


def gradient(function: Callable[..., Any], *args: Any) -> Traced:
    """A function's gradients by all that it is given."""

    def both(*given: Any) -> Any:
        return tg.grad(lambda *x: function(*x).float().sum(), tuple(range(len(given))))(*given)

    return plain(both, *args)


def products() -> Iterator[tuple[str, Traced, tuple[Target, ...]]]:
    """Matrix products: many sizes, layouts, dtypes, and what is done with them."""
    for dtype in (tg.bfloat16, tg.float16, tg.float32):
        for m, n, k in (
            (1, 4096, 4096),
            (4, 1000, 512),
            (8, 4096, 4096),
            (33, 4096, 1024),
            (64, 14336, 4096),
            (128, 4096, 4096),
            (200, 6144, 4096),
            (512, 4096, 4096),
            (2048, 2048, 2048),
            (4096, 4096, 1024),
            (100, 100, 100),
        ):
            if dtype is not tg.bfloat16 and m not in (1, 8, 128, 2048, 100):
                continue
            x, w = of(m, k, dtype=dtype), of(n, k, dtype=dtype)
            name = f"product {m}x{n}x{k} {dtype.name}"
            yield f"{name} nt", plain(lambda x, w: x @ w.T, x, w), ALL
            if m in (8, 128, 2048):
                v = of(k, n, dtype=dtype)
                yield f"{name} nn", plain(lambda x, v: x @ v, x, v), ALL
                yield f"{name} tn", plain(lambda x, v: x.T @ v, of(k, m, dtype=dtype), v), ALL
    x, w, b, r = of(256, 1024), of(2048, 1024), of(2048), of(256, 2048)
    yield "product gelu", plain(lambda x, w, b: F.gelu(x @ w.T + b), x, w, b), ALL
    yield "product residual", plain(lambda x, w, r: r + x @ w.T, x, w, r), ALL
    yield "product float32 result", plain(lambda x, w: (x @ w.T).float(), x, w), ALL
    yield (
        "product row sums",
        plain(lambda x, w: (y := x @ w.T, y.float().square().sum(1)), x, w),
        ALL,
    )
    yield "product batched", plain(lambda x, y: x @ y, of(12, 200, 64), of(12, 64, 200)), ALL
    narrow = (of(64, 512, dtype=tg.int8), of(128, 512, dtype=tg.int8))
    yield "product int8", plain(lambda x, w: x.int() @ w.T.int(), *narrow), ALL
    for m in (1, 8, 32, 256):
        given = (of(m, 1024), of(1024), of(2816, 1024), of(2816, 1024), of(1024, 2816))

        def layer(x: Any, norm: Any, gate: Any, up: Any, down: Any) -> Any:
            y = F.rms_norm(x, (1024,), norm, 1e-5)
            return x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T

        yield f"product layer {m}", plain(layer, *given), ALL


def attentions() -> Iterator[tuple[str, Traced, tuple[Target, ...]]]:
    """Attention: options, widths, lengths, gradients."""
    options: dict[str, dict[str, Any]] = {"full": {}, "causal": {"is_causal": True}}
    for width in (64, 128):
        for tokens in (128, 1024):
            for name, more in options.items():
                q, k = of(2, 8, tokens, width), of(2, 8, tokens, width)
                attend = functools.partial(F.scaled_dot_product_attention, **more)
                label = f"attention {name} {width} {tokens}"
                yield label, plain(attend, q, k, k), ALL
                yield f"{label} gradient", gradient(attend, q, k, of(2, 8, tokens, width)), ALL
    grouped = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    yield "attention grouped", plain(grouped, of(1, 8, 512, 128), *[of(1, 2, 512, 128)] * 2), ALL
    yield "attention one query", plain(grouped, of(4, 32, 1, 128), *[of(4, 8, 2048, 128)] * 2), ALL
    mask = tg.zeros(512, 512, dtype=tg.bool)
    q = of(1, 4, 512, 64)
    masked = functools.partial(F.scaled_dot_product_attention)
    yield "attention mask", plain(lambda q, m: masked(q, q, q, attn_mask=m), q, mask), ALL
    bias = of(1, 4, 512, 512)
    yield "attention bias", plain(lambda q, m: masked(q, q, q, attn_mask=m), q, bias), ALL

    def capped(q: Any, k: Any, v: Any) -> Any:
        s = (q @ k.transpose(-1, -2)).float() * 0.125
        s = 30.0 * (s / 30.0).tanh()
        i, j = tg.arange(512).reshape(512, 1), tg.arange(512).reshape(1, 512)
        s = s.masked_fill((j > i) | (j < i - 100), float("-inf"))
        return (s.softmax(-1).to(v.dtype)) @ v

    yield "attention softcap window", plain(capped, q, q, q), ALL
    yield "attention softcap window gradient", gradient(capped, q, of(1, 4, 512, 64), q), ALL
    for width in (64, 128):
        q, starts = of(1, 4, 512, width), whole(5).to(tg.int32)

        def packed(q: Any, k: Any, v: Any, starts: Any = starts) -> Any:
            return tg.attention(q, k, v, causal=True, query_starts=starts, key_starts=starts)

        given = (q, of(1, 2, 512, width), of(1, 2, 512, width))
        yield f"attention packed {width}", plain(packed, *given), ALL
        yield f"attention packed {width} gradient", gradient(packed, *given), ALL
    small = of(1, 4, 256, 64, dtype=tg.float32)
    yield "attention float32", plain(masked, small, small, small), ALL
    yield "attention float32 gradient", gradient(masked, small, small, small), ALL


def streams() -> Iterator[tuple[str, Traced, tuple[Target, ...]]]:
    """What no matrix unit computes."""
    x, w = of(512, 4096), of(4096)
    wide = of(4096, 1024, dtype=tg.float32)
    cases: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "softmax": (lambda x: x.softmax(-1), (x,)),
        "softmax first axis": (lambda x: x.softmax(0), (wide,)),
        "layer norm": (lambda x, w: F.layer_norm(x, (4096,), w, w), (x, w)),
        "rms norm": (lambda x, w: F.rms_norm(x, (4096,), w, 1e-6), (x, w)),
        "sum": (lambda x: x.sum(), (wide,)),
        "sum rows": (lambda x: x.sum(1), (wide,)),
        "sum columns": (lambda x: x.sum(0), (wide,)),
        "mean variance": (lambda x: (x.mean(1), x.var(1)), (wide,)),
        "argmax": (lambda x: x.argmax(-1), (wide,)),
        "sort": (lambda x: x.sort(-1), (of(64, 1000, dtype=tg.float32),)),
        "topk": (lambda x: x.topk(8, -1), (of(64, 5000, dtype=tg.float32),)),
        "cumsum": (lambda x: x.cumsum(-1), (wide,)),
        "transpose": (lambda x: x.T.contiguous() + 1, (wide,)),
        "elementwise": (lambda x: (x * 2 + 1).sin().exp().tanh().sqrt(), (wide,)),
        "special": (lambda x: x.erf() + x.lgamma() + x.atan2(x + 1) + x.log1p(), (wide,)),
        "power": (lambda x: x**2.5 % 3 // 2, (wide,)),
        "integers": (lambda i: (i * 7 // 3 % 5) ^ (i >> 2), (whole(10000),)),
        "gather": (lambda x, i: x[i], (wide, whole(100))),
        "embedding": (lambda i, w: F.embedding(i, w), (whole(64), x)),
        "scatter": (lambda x, i, v: x.index_add(0, i, v), (wide, whole(100), wide[:100])),
        "concatenate": (lambda x: tg.cat([x, x * 2, x[:3]], 0), (wide,)),
        "pad roll flip": (lambda x: F.pad(x, (1, 2)).roll(3, 0).flip(1), (wide,)),
        "loss": (lambda x, i: F.cross_entropy(x.float(), i), (x, whole(512))),
        "swiglu": (lambda x: F.silu(x[:, :2048]) * x[:, 2048:], (x,)),
        "random": (lambda x: F.dropout(x, 0.1, training=True) + tg.randn(512, 4096), (x,)),
        "convolution": (
            lambda x, w: F.conv2d(x, w, padding=1),
            (of(2, 32, 28, 28, dtype=tg.float32), of(64, 32, 3, 3, dtype=tg.float32)),
        ),
        "pooling": (lambda x: F.max_pool2d(x, 2), (of(2, 32, 28, 28, dtype=tg.float32),)),
        "depthwise": (
            lambda x, w: F.conv2d(x, w, padding=1, groups=32),
            (of(2, 32, 28, 28, dtype=tg.float32), of(32, 1, 3, 3, dtype=tg.float32)),
        ),
        "linear algebra": (lambda x: tg.linalg.cholesky(x @ x.T), (of(64, 64, dtype=tg.float32),)),
        "scan": (
            lambda x: tg.scan(lambda c, y: (c * 0.9 + y, c), x[0], x)[0],
            (of(300, 64, dtype=tg.float32),),
        ),
    }
    rows, long = of(4096, 50304), of(2048, 50304, dtype=tg.float32)
    cases |= {
        "softmax long": (lambda x: x.softmax(-1), (long,)),
        "log softmax long": (lambda x: x.float().log_softmax(-1), (rows,)),
        "loss long": (lambda x, i: F.cross_entropy(x.float(), i), (rows, whole(4096))),
        "rms norm long": (lambda x: F.rms_norm(x, (50304,)), (rows,)),
        "argmax long": (lambda x: x.argmax(-1), (rows,)),
        "sort long": (lambda x: x.sort(-1), (of(16, 100000, dtype=tg.float32),)),
    }
    for name, (function, args) in cases.items():
        yield name, plain(function, *args), ALL
    for name in (
        *("softmax", "layer norm", "rms norm", "loss", "swiglu", "convolution", "embedding"),
        *("softmax long", "loss long"),
    ):
        function, args = cases[name]
        if name.startswith("loss"):
            function, args = (lambda i, x: F.cross_entropy(x.float(), i)), (args[1], args[0])
        floats = [a for a in args if a.dtype.is_float]
        ints = [a for a in args if not a.dtype.is_float]
        yield f"{name} gradient", gradient(functools.partial(function, *ints), *floats), ALL


def decoder(config: dict[str, Any], form: Format | None = None, inputs: str = "") -> Decoder:
    """A model of shapes, or of zeros in a Format, with inputs rounded to one."""
    model = Decoder(DecoderConfig.from_huggingface(config), tg.bfloat16)
    if form is not None:
        layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        for path, layer in layers:
            weight = layer.weight
            weight.node = stored(Zeros(form, *map(int, weight.shape)), weight.dtype).node
            if inputs:
                put(model, path, PackedLinear(layer, None, inputs))
    return model


class Zeros:
    """Weights of zeros as a file of a Format would have them."""

    def __init__(self, form: Format, rows: int, columns: int) -> None:
        self.format, self.shape = form, (rows, columns)
        self.raw = np.zeros((rows, self.format.row_bytes(columns)), np.uint8)

    def drop(self) -> None:
        """Nothing is mapped."""


def stepped(
    model: Decoder,
    batch: int,
    tokens: int,
    variant: Variant,
    target: Target,
    kept: DType = tg.bfloat16,
) -> Any:
    """A decode step, or a step of up to so many tokens; see generate/step.py."""
    config, page = model.config, limits_of(target).page
    cache = nn.PagedCache(
        config.layers,
        4,
        page,
        config.key_heads,
        config.head_width,
        requests=batch + 1,
        most_pages=2048 // page,
        dtype=kept,
    )
    rows = Rows(batch + 1, cache.device)
    state = None if variant == Variant() else SamplingState(batch + 1, config.vocabulary)
    given = (model, cache, rows, state, variant)

    def numbers(count: int) -> tg.Tensor:
        return tg.tensor(np.zeros(count, np.int32))

    with tg.no_grad():
        if not tokens:
            run = tg.jit(step, static="variant")
            return run.lower(*given, numbers(batch), numbers(batch + 1))
        some, requests = symbol("tokens", 1, tokens), symbol("requests", 1, batch)
        axes = {"slots": requests, "starts": requests + 1, "into": requests}
        axes |= {"owner": some, "given": some}
        run = tg.jit(step, static="variant", dynamic={n: {0: s} for n, s in axes.items()})
        return run.lower(*given, *map(numbers, (1, 2, 1, 5, 5)))


def steps() -> Iterator[tuple[str, Traced, tuple[Target, ...]]]:
    """Steps of decoders."""
    large, small = decoder(LLAMA), decoder(SMALL)
    for batch in (1, 8, 32, 128):
        yield (
            f"step decode {batch}",
            functools.partial(stepped, large, batch, 0, Variant()),
            ALL if batch in (1, 32) else GPUS,
        )
    yield "step drawn", functools.partial(stepped, small, 8, 0, DRAWS), ALL
    yield "step prompt", functools.partial(stepped, large, 8, 512, Variant()), ALL
    yield "step small prompt", functools.partial(stepped, small, 4, 64, Variant()), ALL
    experts = decoder(EXPERTS)
    for batch, tokens in ((1, 0), (8, 0), (32, 0), (8, 1024)):
        named = f"step experts {batch}" + (" prompt" if tokens else "")
        yield named, functools.partial(stepped, experts, batch, tokens, Variant()), GPUS
    for form in QUANTISED:
        if 576 % form.block:
            model = decoder({**SMALL, "hidden_size": 768, "num_attention_heads": 12}, form)
        else:
            model = decoder(SMALL, form)
        for batch, tokens in ((1, 0), (8, 0), (4, 512)):
            named = f"step {form.name} {batch}" + (" prompt" if tokens else "")
            yield named, functools.partial(stepped, model, batch, tokens, Variant()), ALL
    for form, inputs in ROUNDED:
        model = decoder(EVEN, form, inputs)
        for batch, tokens in ((1, 0), (8, 0), (64, 0), (4, 512)):
            named = f"step rounded {form.name} {batch}" + (" prompt" if tokens else "")
            step_of = functools.partial(stepped, model, batch, tokens, Variant())
            yield named, step_of, (H200, *CPUS)
    for form in (Q4_0, Q4_1):
        for batch in (16, 64, 200):
            model = decoder(EVEN, form)
            step_of = functools.partial(stepped, model, batch, 0, Variant())
            yield f"step {form.name} {batch}", step_of, GPUS
    for kept in (tg.float8_e4m3, tg.float8_e5m2, tg.int8):
        for batch, tokens in ((1, 0), (8, 0), (4, 512)):
            named = f"step cache {kept.name} {batch}" + (" prompt" if tokens else "")
            step_of = functools.partial(stepped, small, batch, tokens, Variant(), kept=kept)
            yield named, step_of, (H200, *CPUS) if kept.is_float else ALL


def training() -> Iterator[tuple[str, Traced, tuple[Target, ...]]]:
    """A step of training a small GPT."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True)
    optimizer = tg.optim.AdamW(layer.parameters(), lr=1e-3)

    @tg.jit
    def train(layer: Any, optimizer: Any, x: tg.Tensor) -> tg.Tensor:
        loss = layer(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    yield (
        "train",
        lambda target: train.lower(layer, optimizer, of(4, 128, 256, dtype=tg.float32)),
        ALL,
    )


# ---- hashes -------------------------------------------------------------------------------------


def emitted(traced: Any, target: Target) -> list[str]:
    """The text of every distinct program, in the order of the Schedule."""
    schedule: Schedule = schedule_for(traced.inputs, traced.outputs, target, traced.donate)
    bodies = {
        id(s.body): s.body for k in schedule.kernels for s in k.steps if isinstance(s, Launch)
    }
    write, texts = language_of(target).emit, []
    shared = target.memories.get("shared")
    for body in bodies.values():
        program = write(body, "entry", target)
        bytes_ = getattr(program.entry, "shared_bytes", 0)
        if shared is not None and bytes_ > shared.bytes:
            raise MemoryError(
                f"{body.name} takes {bytes_} of {shared.bytes} bytes of shared memory"
            )
        texts.append(program.text)
    return texts


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", default="", help="a JSON file")
    parser.add_argument("--against", default="", help="a JSON file written before")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name has one of these")
    parser.add_argument("--target", default="", help="Targets whose name has this")
    parser.add_argument("--show", default="", help="print the text of this case")
    given = parser.parse_args()
    before = json.loads(Path(given.against).read_text()) if given.against else {}
    found: dict[str, list[str]] = {}
    failed = 0
    began = time.perf_counter()
    for family in (products, attentions, streams, steps, training):
        for name, trace, targets in family():
            for target in targets:
                key = f"{name} {target.name}"
                wanted = any(w in key for w in given.only) and given.target in target.name
                if not wanted or (given.show and key != given.show):
                    continue
                try:
                    texts = emitted(trace(target), target)
                except Exception as error:
                    texts = [f"{type(error).__name__}: {str(error)[:200]}"]
                if given.show:
                    print("\n".join(texts))
                found[key] = [hashlib.sha256(t.encode()).hexdigest()[:16] for t in texts]
                if len(texts) == 1 and re.match(r"\w+(Error|Exception|Interrupt): ", texts[0]):
                    print(f"FAILED {key}: {texts[0]}", flush=True)
                    failed += 1
                if given.against and set(found[key]) != set(before.get(key, ())):
                    print(f"differs: {key}", flush=True)
    seconds = time.perf_counter() - began
    count = len({h for hashes in found.values() for h in hashes})
    print(f"{len(found)} cases, {count} programs, {failed} failed, {seconds:.0f} s")
    if given.write:
        Path(given.write).write_text(json.dumps(found, indent=0) + "\n")
    different = [k for k in found if given.against and set(found[k]) != set(before.get(k, ()))]
    print(f"{len(different)} differ" if given.against else "")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
