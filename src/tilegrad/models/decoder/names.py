"""Names of weights: from those of Hugging Face and of GGUF files to the decoder's own.

A `Source` says where one of our Parameters comes from: a name (or one for each expert), which
rows of it, and whether it is transposed or its rows are in the order of llama.cpp. The tables list
them, first match wins. Weights arrive as a mapping from name to array, so any reader plugs in;
arrays may be NumPy's, torch's or Tensors, and are only sliced, reshaped and transposed here.
Tensors of files (`exchange.Stored`) are read, or stay there if they are quantised (see
`tensor.stored`), those of experts too; weights stored transposed are always read.
Invariant: nothing is loaded unless all shapes fit and, if strict, no name is missing or unused.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import ShapeError, UserError
from ...core.format import format_of
from ...nn.linear import Linear
from ...nn.module import Keys, Module
from ...quant.calibrate import put
from ...quant.layers import PackedLinear
from ...tensor.movement import stack
from ...tensor.realize import from_array
from ...tensor.stored import multiplies_groups, stored
from ...tensor.tensor import Tensor, lift, no_grad, wrap

if TYPE_CHECKING:
    from .config import DecoderConfig

OP = "Decoder.load"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Where a Parameter comes from; `{}` in the name is the number of an expert."""

    name: str
    part: str = ""  # rows of a fused weight: query, key, value, gate or up
    transposed: bool = False  # stored (in, out)
    interleaved: bool = False  # rows of heads lie as llama.cpp turns them: pairs side by side
    alternating: bool = False  # rows of gate and up of a fused weight take turns
    by_head: bool = False  # a fused weight has query, key and value of one head after the other's


def fused(
    name: str, *parts: str, transposed: bool = False, by_head: bool = False
) -> dict[str, Source]:
    """Sources of the parts of one weight, by part."""
    return {p: Source(name, p, transposed, by_head=by_head) for p in parts}


QKV, GATED = ("query", "key", "value"), ("gate", "up")

# Ours -> theirs, without the suffix (.weight, .bias): outside of blocks, then within one.
HUGGINGFACE_TOP = {"embed": "embed_tokens", "positions": "", "norm": "norm", "head": "lm_head"}
HUGGINGFACE: dict[str, tuple[Source, ...]] = {
    "attention_norm": (Source("input_layernorm"),),
    "feed_norm": (Source("post_attention_layernorm"),),
    **{
        f"attention.{p}": (Source(f"self_attn.{p[0]}_proj"), s)
        for p, s in fused("self_attn.qkv_proj", *QKV).items()
    },
    "attention.output": (Source("self_attn.o_proj"),),
    "attention.query_norm": (Source("self_attn.q_norm"),),
    "attention.key_norm": (Source("self_attn.k_norm"),),
    **{
        f"feed.{p}": (Source(f"mlp.{p}_proj"), s)
        for p, s in fused("mlp.gate_up_proj", *GATED).items()
    },
    "feed.down": (Source("mlp.down_proj"),),
    "feed.router": (Source("mlp.gate"), Source("block_sparse_moe.gate"), Source("mlp.router")),
    **{f"feed.shared.{p}": (Source(f"mlp.shared_expert.{p}_proj"),) for p in (*GATED, "down")},
    "feed.shared_gate": (Source("mlp.shared_expert_gate"),),
}
GEMMA = {  # what the others call post_attention_layernorm comes after attention indeed
    "attention_post_norm": (Source("post_attention_layernorm"),),
    "feed_norm": (Source("pre_feedforward_layernorm"),),
    "feed_post_norm": (Source("post_feedforward_layernorm"),),
}
PHI_TOP = {**HUGGINGFACE_TOP, "norm": "final_layernorm"}
PHI = {
    **HUGGINGFACE,
    "attention.output": (Source("self_attn.dense"),),
    "feed.up": (Source("mlp.fc1"),),
    "feed.down": (Source("mlp.fc2"),),
}
NEOX_TOP = {"embed": "embed_in", "norm": "final_layer_norm", "head": "embed_out"}
NEOX: dict[str, tuple[Source, ...]] = {
    "attention_norm": (Source("input_layernorm"),),
    "feed_norm": (Source("post_attention_layernorm"),),
    **{
        f"attention.{p}": (s,)
        for p, s in fused("attention.query_key_value", *QKV, by_head=True).items()
    },
    "attention.output": (Source("attention.dense"),),
    "feed.up": (Source("mlp.dense_h_to_4h"),),
    "feed.down": (Source("mlp.dense_4h_to_h"),),
}
GPT2_TOP = {"embed": "wte", "positions": "wpe", "norm": "ln_f", "head": "lm_head"}
GPT2: dict[str, tuple[Source, ...]] = {
    "attention_norm": (Source("ln_1"),),
    "feed_norm": (Source("ln_2"),),
    **{f"attention.{p}": (s,) for p, s in fused("attn.c_attn", *QKV, transposed=True).items()},
    "attention.output": (Source("attn.c_proj", transposed=True),),
    "feed.up": (Source("mlp.c_fc", transposed=True),),
    "feed.down": (Source("mlp.c_proj", transposed=True),),
}
GGUF_TOP = {
    "embed": "token_embd",
    "positions": "position_embd",
    "norm": "output_norm",
    "head": "output",
}
GGUF: dict[str, tuple[Source, ...]] = {
    "attention_norm": (Source("attn_norm"),),
    "feed_norm": (Source("ffn_norm"),),
    **{f"attention.{p}": (Source(f"attn_{p[0]}"), s) for p, s in fused("attn_qkv", *QKV).items()},
    "attention.output": (Source("attn_output"),),
    "attention.query_norm": (Source("attn_q_norm"),),
    "attention.key_norm": (Source("attn_k_norm"),),
    "attention_post_norm": (Source("post_attention_norm"),),
    "feed_post_norm": (Source("post_ffw_norm"),),
    **{f"feed.{p}": (Source(f"ffn_{p}"),) for p in (*GATED, "down")},
    "feed.router": (Source("ffn_gate_inp"),),
    **{f"feed.shared.{p}": (Source(f"ffn_{p}_shexp"),) for p in (*GATED, "down")},
    "feed.shared_gate": (Source("ffn_gate_inp_shexp"),),
}
GGUF_LLAMA = {
    f"attention.{p}": (Source(f"attn_{p[0]}", interleaved=True),) for p in ("query", "key")
}
GGUF_GPT_OSS = {"feed_norm": (Source("post_attention_norm"),)}
GGUF_PHI3 = {f"feed.{p}": (s,) for p, s in fused("ffn_up", *GATED).items()}
# By family, where they differ: names outside of blocks, in them, of the blocks, before all of them.
FOLDERS: dict[str, tuple[dict[str, str], dict[str, tuple[Source, ...]], str, str]] = {
    "gpt2": (GPT2_TOP, GPT2, "h", "transformer."),
    "gpt_neox": (NEOX_TOP, NEOX, "layers", "gpt_neox."),
    "phi": (PHI_TOP, PHI, "layers", "model."),
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "olmo2"),
        (HUGGINGFACE_TOP, {**HUGGINGFACE, **GEMMA}, "layers", "model."),
    ),
}
FILES = {
    "phi3": GGUF_PHI3,
    "gpt-oss": GGUF_GPT_OSS,
    **dict.fromkeys(("llama", "granite", "smollm3"), GGUF_LLAMA),
}

# Weights of all experts, whole names: fused, stacked, or one by one.
HUGGINGFACE_EXPERTS = {
    "feed.gate": (
        Source("mlp.experts.gate_up_proj", "gate"),
        Source("mlp.experts.{}.gate_proj.weight"),
        Source("block_sparse_moe.experts.{}.w1.weight"),
    ),
    "feed.up": (
        Source("mlp.experts.gate_up_proj", "up"),
        Source("mlp.experts.{}.up_proj.weight"),
        Source("block_sparse_moe.experts.{}.w3.weight"),
    ),
    "feed.down": (
        Source("mlp.experts.down_proj"),
        Source("mlp.experts.{}.down_proj.weight"),
        Source("block_sparse_moe.experts.{}.w2.weight"),
    ),
}
# gpt-oss: plain weights lie (experts, in, out), quantised ones have rows of outputs as ours.
GPT_OSS_WHOLE = {
    "attention.sinks": (Source("self_attn.sinks"),),
    **{
        f"feed.{p}": (Source("mlp.experts.gate_up_proj", p, transposed=True, alternating=True),)
        for p in GATED
    },
    **{
        f"feed.{p}_bias": (Source("mlp.experts.gate_up_proj_bias", p, alternating=True),)
        for p in GATED
    },
    "feed.down": (Source("mlp.experts.down_proj", transposed=True),),
    "feed.down_bias": (Source("mlp.experts.down_proj_bias"),),
}
GGUF_WHOLE = {
    "attention.sinks": (Source("attn_sinks.weight"),),
    **{
        f"feed.{p}": (Source(f"ffn_{p}_exps.weight"), Source(f"ffn_{p}.{{}}.weight"))
        for p in (*GATED, "down")
    },
    **{f"feed.{p}_bias": (Source(f"ffn_{p}_exps.bias"),) for p in (*GATED, "down")},
}

# Names in files that are no weights of the text model.
IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|\.(attn|attention)\.(masked_)?bias$|^rope_(freqs|factors_\w+)\.weight$"
    r"|(^|\.)(vision_tower|vision_model|multi_modal_projector|mtp)\."
)


class Names:
    """Where our names are found in one set of weights."""

    def __init__(self, config: DecoderConfig, given: Mapping[str, Any], device: str = "") -> None:
        self.config, self.given, self.device = config, given, device
        self.gguf = "token_embd.weight" in given
        folder = GPT_OSS_WHOLE if config.family == "gpt_oss" else HUGGINGFACE_EXPERTS
        self.whole = GGUF_WHOLE if self.gguf else folder  # names without a suffix
        if self.gguf:
            self.top, self.block = GGUF_TOP, {**GGUF, **FILES.get(config.family, {})}
            self.layers, self.prefix = "blk", ""
        else:
            usual = (HUGGINGFACE_TOP, HUGGINGFACE, "layers", "model.")
            self.top, self.block, self.layers, start = FOLDERS.get(config.family, usual)
            self.prefix = self._prefix(f"{self.top['embed']}.weight", start)

    def _prefix(self, embedding: str, usual: str) -> str:
        """What is before all names: the embedding's name tells."""
        found = [n[: -len(embedding)] for n in self.given if n.endswith(embedding)]
        return min(found, key=len) if found else usual

    def sources(self, name: str) -> list[Source]:
        """Where a Parameter may come from, whole names, the likeliest first."""
        inside = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        if inside is None:
            part, suffix = name.rsplit(".", 1)
            whole = f"{self.top[part]}.{suffix}"
            if part == "head" and not self.gguf:  # newer files call it one name in all families
                wanted = (whole, f"lm_head.{suffix}")
                heads = [n for n in self.given if n.endswith(wanted)]
                return [Source(heads[0] if heads else whole)]
            return [Source(self.prefix + whole)]
        start, path = f"{self.prefix}{self.layers}.{inside[1]}.", inside[2]
        if path in self.whole:
            return [_named(s, start + s.name) for s in self.whole[path]]
        part, suffix = path.rsplit(".", 1)
        return [_named(s, f"{start}{s.name}.{suffix}") for s in self.block[part]]

    def given_names(self, source: Source) -> list[str]:
        """The names a Source stands for: one, or one for each expert."""
        if "{}" not in source.name:
            return [source.name]
        return [source.name.format(e) for e in range(self.config.experts)]

    def pick(self, name: str) -> Source | None:
        """The Source of a Parameter that is there."""
        for source in self.sources(name):
            if all(n in self.given for n in self.given_names(source)):
                return source
        return None

    def stays(self, source: Source | None) -> bool:
        """Whether a weight can be read where the file stores it: rows of a quantised tensor, or of
        those of all experts if they are blocks of one Format, or codes that a device multiplies."""
        if source is None:
            return False
        first, *others = self.given_names(source)
        found = self.given[first]
        if not _quantised(found):
            return False
        if "{}" not in source.name and len(found.shape) == 2:
            return not source.transposed
        alike = all(
            _quantised(one) and one.format is found.format and one.shape == found.shape
            for one in map(self.given.__getitem__, others)
        )
        if not alike or getattr(found, "order", None) is not None:
            return False
        read = self._multiplies(source) if found.format.apart else True
        return read and len(found.shape) == (2 if others else 3)

    def unpacked(self) -> Iterator[tuple[str, list[str]]]:
        """Experts that a file has quantised and that are unpacked: ours, and the names there."""
        for number in range(self.config.layers if self.config.experts else 0):
            for part in (*GATED, "down"):
                name = f"blocks.{number}.feed.{part}"
                source = self.pick(name)
                theirs = [] if source is None else self.given_names(source)
                if theirs and _quantised(self.given[theirs[0]]) and not self.stays(source):
                    yield name, theirs

    def _multiplies(self, source: Source) -> bool:
        """Whether the device multiplies experts' codes: rows of inputs are rounded alike for all,
        each by itself or by scales that the file has."""
        given = [self.given[name] for name in self.given_names(source)]
        inputs: list[Any] = [getattr(one, "input", None) for one in given]
        first, shape = inputs[0], (len(given), *given[0].shape)[-3:]
        if not self.device or None in inputs or len(shape) < 3:
            return False
        own = format_of(first.format).grain.rows == 1
        if any(i.format != first.format or (i.scale is None) != own for i in inputs):
            return False
        return multiplies_groups(given[0].format.name, first.format, shape, self.device)

    # ---- values -----------------------------------------------------------------------------

    def value(self, name: str, source: Source) -> Any:
        """The array of a Parameter: slices and other orders of what is given."""
        given = [self.given[n] for n in self.given_names(source)]
        arrays = [_plain(one) for one in given]
        if "{}" in source.name:
            return stack([lift(a) for a in arrays])
        if source.transposed and arrays[0].ndim == 3 and not _quantised(given[0]):
            arrays = [arrays[0].swapaxes(1, 2)]
        return self.arranged(name, source, arrays[0])

    def arranged(self, name: str, source: Source, array: Any) -> Any:
        """The rows of a given array that a Parameter has, in its order."""
        if source.transposed and array.ndim == 2:
            array = array.T
        if source.part:
            array = self._rows(source, array)
        if source.interleaved:
            heads = self.config.heads if ".query." in name else self.config.key_heads
            array = halves_of(array, heads)
        if name.endswith("shared_gate.weight") and array.ndim == 1:
            array = array.reshape(1, -1)
        return array

    def _rows(self, source: Source, array: Any) -> Any:
        """The rows of one part of a fused weight; experts have an axis before them."""
        config = self.config
        inner, outer = config.heads * config.head_width, config.key_heads * config.head_width
        of_experts = array.ndim == 3 or source.alternating
        axis, each = int(of_experts), config.expert_hidden if of_experts else config.hidden
        ranges = {
            "query": (0, inner),
            "key": (inner, inner + outer),
            "value": (inner + outer, inner + 2 * outer),
            "gate": (0, each),
            "up": (each, 2 * each),
        }
        if source.by_head:
            return self._of_heads(source, array)
        whole = 2 * each if source.part in GATED else inner + 2 * outer
        if array.shape[axis] != whole:
            raise ShapeError(
                f"{source.name} does not hold its parts",
                op=OP,
                expected=f"{whole} rows",
                got=tuple(array.shape),
            )
        if source.alternating:
            return array[:, GATED.index(source.part) :: 2]
        first, end = ranges[source.part]
        return array[:, first:end] if axis else array[first:end]

    def _of_heads(self, source: Source, array: Any) -> Any:
        """The rows of one part where each head has its query, key and value together."""
        heads, width, rest = self.config.heads, self.config.head_width, tuple(array.shape[1:])
        whole = 3 * heads * width
        if array.shape[0] != whole or self.config.key_heads != heads:
            raise ShapeError(
                f"{source.name} does not hold its parts",
                op=OP,
                expected=f"{whole} rows",
                got=tuple(array.shape),
            )
        found = array.reshape(heads, 3, width, *rest)[:, QKV.index(source.part)]
        return found.reshape(heads * width, *rest)


def _quantised(value: Any) -> bool:
    return bool(getattr(getattr(value, "format", None), "quantised", False))


def _plain(value: Any) -> Any:
    """An array: a tensor of a file is read, and unpacked if it is quantised."""
    if not hasattr(value, "format"):
        return value
    return value.values() if value.format.quantised else value.array()


def _named(source: Source, name: str) -> Source:
    return replace_field(source, name=name)


def halves_of(array: Any, heads: int) -> Any:
    """Rows of each head from pairs side by side (llama.cpp) to two halves (ours)."""
    shape = tuple(array.shape)
    if shape[0] % (2 * heads):
        raise ShapeError(
            "rows do not divide into pairs of heads",
            op=OP,
            expected=f"a multiple of {2 * heads}",
            got=shape,
        )
    cut = array.reshape(heads, shape[0] // heads // 2, 2, *shape[1:])
    return cut.swapaxes(1, 2).reshape(*shape)


def load(
    model: Module,
    config: DecoderConfig,
    weights: Mapping[str, Any],
    strict: bool = True,
    keep: str = "",
    device: str = "",
) -> Keys:
    """Give a Decoder its weights; what is missing and what no Parameter wants, by name."""
    if keep not in ("", "quantised"):
        raise UserError(
            "unknown way to keep weights", op=OP, expected="'' or 'quantised'", got=repr(keep)
        )
    names = Names(config, weights, device)
    ours = dict(model.named_parameters())
    picked = {n: names.pick(n) for n in ours}
    missing = [names.sources(n)[0].name for n, s in picked.items() if s is None]
    used = {g for s in picked.values() if s is not None for g in names.given_names(s)}
    unused = [n for n in weights if n not in used and not _ignored(n, config)]
    if strict and (missing or unused):
        raise UserError(
            "the names do not fit",
            op=OP,
            expected=f"missing: {_listed(missing)}",
            got=f"unused: {_listed(unused)}",
            hint="strict=False takes what fits",
        )
    stay = {n: Rows(names, n, s) for n, s in picked.items() if keep and s and names.stays(s)}
    stay = {n: rows for n, rows in stay.items() if _alike(n, stay)}
    for name, rows in stay.items():
        _check(rows.stored.name, name, rows.shape, ours[name])
    rest = {n: s for n, s in picked.items() if n not in stay}
    for _, (first, *_) in names.unpacked() if keep else ():
        form = weights[first].format
        log.warning("experts %s of %s are unpacked: no kernel reads them", first, form)
    with no_grad():
        for name, tensor in list(_checked(names, ours, rest)):
            ours[name].assign(tensor)
    scales: dict[tuple[str, float], Any] = {}
    for name, rows in stay.items():
        ours[name].requires_grad = False
        ours[name].node = stored(rows, ours[name].dtype).node
        if len(rows.shape) == 3:
            _round_inputs(model, name, stay)
        else:
            _as_stored(model, name, rows, scales)
    return Keys(missing, unused)


def _readers_alike(name: str) -> list[str]:
    """The experts' weights that read what some do: gate and up, or down alone."""
    path, _, part = name.rpartition(".")
    return [f"{path}.{other}" for other in (GATED if part in GATED else (part,))]


def _alike(name: str, stay: Mapping[str, Rows]) -> bool:
    """Whether all weights that read what some experts' do ask for it in one Format."""
    rows = stay[name]
    if len(rows.shape) < 3 or not rows.inputs:
        return True
    found = [stay[other].inputs if other in stay else [] for other in _readers_alike(name)]
    return all(found) and len({one.format for inputs in found for one in inputs}) == 1


def _round_inputs(model: Module, name: str, stay: Mapping[str, Rows]) -> None:
    """Let experts round what they read, where their weights ask for it: scales that a file gives
    are one for all, the largest."""
    if stay[name].inputs:
        inputs = [one for other in _readers_alike(name) for one in stay[other].inputs]
        scale = max((one.scale for one in inputs if one.scale is not None), default=None)
        path, _, which = _readers_alike(name)[0].rpartition(".")
        model.get_submodule(path).round_inputs(which, inputs[0].format, scale)


def _as_stored(model: Module, name: str, rows: Rows, scales: dict[tuple[str, float], Any]) -> None:
    """Put a layer that does to its inputs what the file asks for in the place of a Linear. Layers
    side by side (q, k and v) share a scale of inputs that is the same for each, so that what they
    read is rounded once; `scales` are those before."""
    order, given = getattr(rows.stored, "order", None), getattr(rows.stored, "input", None)
    if order is None and given is None:
        return
    path = name.removesuffix(".weight")
    layer = model.get_submodule(path)
    if not isinstance(layer, Linear):
        raise UserError("only linear layers round their inputs", op=OP, got=rows.stored.name)
    form, scale = ("", None) if given is None else (given.format, given.scale)
    made = PackedLinear(layer, order, form, scale)
    if scale is not None:
        near = (path.rpartition(".")[0], scale)
        made.input_scale = scales.setdefault(near, made.input_scale)
    put(model, path, made)


class Rows:
    """Weights of one Parameter as `tensor.stored` takes them: rows of a file, in our order."""

    def __init__(self, names: Names, name: str, source: Source) -> None:
        self.names, self.name, self.source = names, name, source
        self.given = [names.given[n] for n in names.given_names(source)]
        self.stored = self.given[0]
        self.format = self.stored.format
        given = [getattr(one, "input", None) for one in self.given]
        self.inputs = [one for one in given if one is not None]  # what is asked of its inputs
        *lead, columns = self.stored.shape
        lead = [len(self.given), *lead] if "{}" in source.name else lead
        self.count = math.prod(lead)
        self.rows = self._arranged(np.arange(self.count).reshape(*lead, 1))[..., 0]
        self.shape = (*self.rows.shape, columns)

    def _arranged(self, array: Any) -> Any:
        if "{}" in self.source.name:
            return array
        return self.names.arranged(self.name, self.source, array)

    @property
    def raw(self) -> Any:
        """Their bytes; a copy where the file has another order, or one tensor for each expert."""
        several = "{}" in self.source.name
        raw = np.stack([one.raw for one in self.given]) if several else self.stored.raw
        straight = np.array_equal(self.rows.ravel(), np.arange(self.count))
        return raw if straight else self._arranged(raw)

    def drop(self) -> None:
        """Let the system take back the file's pages."""
        for one in self.given:
            one.drop()


def _checked(
    names: Names, ours: dict[str, Any], picked: dict[str, Source | None]
) -> Iterator[tuple[str, Tensor]]:
    """Values with the shapes of our Parameters."""
    for name, source in picked.items():
        if source is None:
            continue
        value = _shared(names.value(name, source))
        _check(source.name, name, value.shape, ours[name])
        yield name, value


def _check(theirs: str, name: str, shape: Sequence[Any], ours: Tensor) -> None:
    """Refuse what does not have the shape of our Parameter."""
    if tuple(shape) != tuple(ours.shape):
        raise ShapeError(
            f"{theirs} does not fit",
            op=OP,
            got=tuple(shape),
            expected=f"{name} of {tuple(ours.shape)}",
        )


def _shared(value: Any) -> Tensor:
    """A Tensor of a value; what nobody may write to, as the pages of a file, is not copied."""
    mapped = isinstance(value, np.ndarray) and not value.flags.writeable
    return wrap(from_array(value)) if mapped else lift(value)


def _ignored(name: str, config: DecoderConfig) -> bool:
    heads = ("lm_head.weight", "embed_out.weight")
    tied = config.tied and (name == "output.weight" or name.endswith(heads))
    return tied or IGNORED.search(name) is not None


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return (shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")) or "none"


__all__ = ["Names", "Source", "halves_of", "load"]
