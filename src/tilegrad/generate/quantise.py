"""A model's files in, quantised files out: what `tilegrad quantize` does.

A folder becomes a folder of compressed-tensors, a GGUF file a GGUF file. Blocks are rounded one at
a time and written as they are done. Invariant: the source is only read; what was written is opened
again, as any model is, to be judged.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..core.dtype import float32
from ..core.errors import UserError
from ..core.format import QUANTISED, Format, format_of
from ..core.place import check_place
from ..exchange.compressed_write import FolderWriter, described, described_each, parts_of
from ..exchange.fetch import open_model
from ..exchange.folder import ModelFolder
from ..exchange.gguf import NUMBERS, GgufFile
from ..exchange.gguf_write import write_gguf
from ..exchange.mapped import Stored
from ..models.decoder.model import Decoder
from ..models.decoder.names import Names, Rows
from ..models.decoder.quantise import perplexity, quantise_decoder, sensitivities
from ..nn import init
from ..nn.linear import Identity
from ..quant.layerwise import RECIPES, WORD, Recipe, Rounding
from ..quant.mixed import Option, choose, recipe_of
from ..quant.recipes import finite
from .load import Weights, cache_facts, config_of, load_model, tokenizer_of

Array = np.ndarray[Any, Any]
Tell = Callable[[str, float, float], None]
BLOCKS = tuple(form.name.lower() for form in QUANTISED if form.name in NUMBERS)
# What a row takes whose length is no multiple of 256.
SHORTER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
GROUP, GGUF_GROUP = 128, 32  # columns that share a scale, where nothing else is asked for
# ModelOpt's words for keys and values, as compressed-tensors says them.
SCHEMES = {
    word: {"type": kind, "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
    for word, kind in (("FP8", "float"), ("INT8", "int"))
}
WHOLE = "Q8_0"  # embeddings and heads of GGUF files


@dataclass
class Report:
    """What was done and what it cost."""

    source: str
    out: str
    to: str
    bytes_before: int = 0
    bytes_after: int = 0
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    layers: list[tuple[str, str, float]] = field(default_factory=list)  # name, Format, error
    bits: float | None = None  # of a weight of the layers, scales included

    def record(self) -> dict[str, Any]:
        """As plain data."""
        return {**vars(self), "layers": [list(one) for one in self.layers]}


@dataclass(frozen=True)
class Wanted:
    """What is asked for."""

    to: str
    text: str = ""  # to look at
    judged: str = ""  # to measure perplexity on
    group: int = 0  # columns that share a scale; 0: 32 in GGUF files, else 128
    samples: int = 32
    length: int = 256
    target_bits: float = 0.0  # of a weight, scales included: bits of layers are chosen

    def __post_init__(self) -> None:
        bad = self.target_bits < 0 or not math.isfinite(self.target_bits)
        if self.target_bits and (self.to in BLOCKS or bad):
            expected = "a finite number of bits above 0, of a recipe as gptq-int4"
            raise UserError(
                "bits cannot be chosen", op="quantize", expected=expected, got=self.target_bits
            )
        if self.to not in BLOCKS and WORD.match(self.to) is None:
            raise UserError(
                "no such numbers",
                op="quantize",
                expected=", ".join((*RECIPES, *BLOCKS)),
                got=self.to,
            )


def quantise_model(
    name: str | os.PathLike[str], out: str | os.PathLike[str], wanted: Wanted, tell: Tell
) -> Report:
    """Quantise a model's files into new ones."""
    if Path(out).is_file() or (Path(out).is_dir() and any(Path(out).iterdir())):
        raise UserError("there is something already", op="quantize", got=os.fspath(out))
    files = open_model(name, lambda p: tell(p.stage, p.done, p.total))
    report = Report(files.path, os.fspath(out), wanted.to)
    report.bytes_before = sum(t.bytes for t in files.tensors.values())
    check_place(out, "quantize", folder=isinstance(files, ModelFolder))
    judged = _rows(files, wanted.judged, wanted, 0)
    if isinstance(files, ModelFolder):
        _folder(files, out, wanted, report, judged, tell)
    else:
        _gguf(files, out, wanted, report, judged, tell)
    if judged:
        after = load_model(out, "cpu", float32, tell)
        report.perplexity_after = perplexity(after.model, judged)
    return report


def _rows(files: GgufFile | ModelFolder, text: str, wanted: Wanted, most: int) -> list[Array]:
    """Rows of tokens (1, length) of a text, all of one length; at most so many, 0 for all."""
    if not text:
        return []
    tokens = tokenizer_of(files).encode(text)
    length = min(wanted.length, config_of(files).context)
    count = len(tokens) // length
    if count < 1:
        raise UserError(
            "the text is too short", op="quantize", expected=f"{length} tokens", got=len(tokens)
        )
    found = np.asarray(tokens[: count * length], np.int64).reshape(count, 1, length)
    step = max(1, count // most) if most else 1
    return list(found[::step][: most or None])


def _opened(files: GgufFile | ModelFolder, tell: Tell) -> Decoder:
    with init.skipped():
        model = Decoder(config_of(files), float32).requires_grad_(False).eval()
    model.load(Weights(files.tensors, float32, tell), keep="quantised")
    return model


def _rounded(
    model: Decoder,
    files: GgufFile | ModelFolder,
    recipe: Recipe,
    wanted: Wanted,
    report: Report,
    tell: Tell,
    write: Callable[[int, list[Rounding]], None],
) -> None:
    """Round all blocks; each is written and let go."""
    if recipe.needs_samples and not wanted.text:
        raise UserError(
            "this recipe looks at text", op="quantize", expected="--text FILE", got=recipe.name
        )
    samples = _rows(files, wanted.text, wanted, wanted.samples)
    count = len(model.blocks)
    each = _chosen(model, recipe, samples, wanted.target_bits, tell) if wanted.target_bits else ()
    size = elements = 0
    for number, layers in quantise_decoder(model, recipe, samples, each=each):
        write(number, layers)
        for one in layers:
            size, elements = size + one.bytes, elements + one.shape[0] * one.shape[1]
            entry = (f"blocks.{number}.{one.name}", one.format.name, one.error)
            report.layers.append(entry)
        model.blocks[number] = Identity()
        tell("quantise", number + 1, count)
    report.bits = 8 * size / elements


def _chosen(
    model: Decoder, recipe: Recipe, samples: Sequence[Array], bits: float, tell: Tell
) -> list[dict[str, Recipe]]:
    """The recipe of every layer of every block, within so many bits of a weight."""
    options: dict[str, list[Option]] = {}
    elements, count = 0, len(model.blocks)
    for number, found in sensitivities(model, recipe, samples):
        for name, given in found.items():
            options[f"{number} {name}"] = given
            layer: Any = model.blocks[number].get_submodule(name)
            elements += layer.in_features * layer.out_features
        tell("look", number + 1, count)
    least = 8 * sum(min(one.bytes for one in given) for given in options.values()) / elements
    if bits < least:
        raise UserError(
            "the bits are too few",
            op="quantize",
            expected=f"at least {math.ceil(100 * least) / 100} bits of a weight, scales included",
            got=bits,
        )
    each: list[dict[str, Recipe]] = [{} for _ in range(count)]
    for where, option in choose(options, elements * bits / 8).items():
        block, _, name = where.partition(" ")
        each[int(block)][name] = recipe_of(recipe, option)
    return each


# ---- folders ------------------------------------------------------------------------------------


def _folder(
    files: ModelFolder,
    out: str | os.PathLike[str],
    wanted: Wanted,
    report: Report,
    judged: Sequence[Array],
    tell: Tell,
) -> None:
    if wanted.to in BLOCKS:
        raise UserError(
            "blocks of llama.cpp are written of GGUF files",
            op="quantize",
            expected=", ".join(RECIPES),
            got=wanted.to,
        )
    recipe = Recipe(wanted.to, group=wanted.group or GROUP)
    model = _opened(files, tell)
    if judged:
        report.perplexity_before = perplexity(model, judged)
    names, writer = Names(model.config, files.tensors), FolderWriter(out, files.path)
    forms: dict[str, Format] = {}
    done: set[str] = set()

    def write(number: int, layers: list[Rounding]) -> None:
        tensors: dict[str, Array] = {}
        rounded = {f"{one.name}.weight": one for one in layers}
        for path, parameter in model.blocks[number].named_parameters():
            name = _theirs(names, f"blocks.{number}.{path}")
            done.add(name)
            if path in rounded:
                one = rounded[path]
                layer = name.removesuffix(".weight")
                forms[layer] = one.format
                parts = parts_of(one.format, one.raw, one.shape)
                tensors |= {f"{layer}.{suffix}": array for suffix, array in parts.items()}
            else:
                tensors[name] = np.array(parameter.numpy())
        writer.add(tensors)

    _rounded(model, files, recipe, wanted, report, tell, write)
    rest = {n: t.array() for n, t in files.tensors.items() if n not in done}
    writer.add(rest | {name: scale.array() for name, scale in files.cache_scales.items()})
    config = {k: v for k, v in files.config.items() if k != "quantization_config"}
    if wanted.target_bits:
        quantised = described_each(forms, ("lm_head",))
    else:
        (form,) = set(forms.values())
        quantised = described(form, recipe.input_format, ("lm_head",))
    kept = cache_facts(files)
    if kept is not None:
        quantised["kv_cache_scheme"] = SCHEMES.get(str(kept.scheme).upper(), kept.scheme)
    writer.finish(config, quantised)
    report.bytes_after = writer.bytes


def _theirs(names: Names, ours: str) -> str:
    """The name that a folder has for one of our Parameters, as it is."""
    source = names.pick(ours)
    if source is None or source.part or source.transposed:
        raise UserError(
            "this family's weights are not written yet",
            op="quantize",
            expected="a folder with a tensor for each layer",
            got=ours if source is None else source.name,
        )
    return source.name


# ---- GGUF files ---------------------------------------------------------------------------------


def _gguf(
    files: GgufFile,
    out: str | os.PathLike[str],
    wanted: Wanted,
    report: Report,
    judged: Sequence[Array],
    tell: Tell,
) -> None:
    if wanted.group not in (0, GGUF_GROUP):
        raise UserError(
            "blocks of GGUF files are what they are",
            op="quantize",
            expected=f"no --group, or {GGUF_GROUP}",
            got=wanted.group,
        )
    if wanted.target_bits:
        raise UserError("bits are chosen of folders", op="quantize", got=wanted.target_bits)
    model = _opened(files, tell)
    if judged:
        report.perplexity_before = perplexity(model, judged)
    if wanted.to in BLOCKS:
        del model
        tensors = _in_blocks(files, format_of(wanted.to), report, tell)
    elif Recipe(wanted.to).input_format or Recipe(wanted.to).bits != 4:
        raise UserError(
            "GGUF files have no such layers",
            op="quantize",
            expected="q8_0, q4_k, gptq-int4, ...",
            got=wanted.to,
        )
    else:
        tensors = dict(files.tensors)
        names = Names(model.config, files.tensors)

        def write(number: int, layers: list[Rounding]) -> None:
            tensors.update(_as_q4_1(model, names, number, layers))

        recipe = Recipe(wanted.to, group=GGUF_GROUP)
        _rounded(model, files, recipe, wanted, report, tell, write)
    write_gguf(out, files.metadata, tensors, kinds=files.kinds)
    report.bytes_after = sum(t.bytes for t in tensors.values())


def _in_blocks(files: GgufFile, form: Format, report: Report, tell: Tell) -> dict[str, Stored]:
    """Every matrix packed anew; rows that are no whole blocks take blocks of 32."""
    found: dict[str, Stored] = {}
    for number, (name, tensor) in enumerate(files.tensors.items()):
        own = form if name.startswith("blk.") else format_of(WHOLE)
        if len(tensor.shape) < 2 or name.endswith(("_inp.weight", "position_embd.weight")):
            found[name] = tensor
            continue
        if tensor.shape[-1] % own.block:
            own = format_of(SHORTER.get(own.name, own.name))
        values = finite(name, tensor.values())
        raw = own.pack(values)
        near = own.to_float32(raw).reshape(values.shape)
        size = float((values.astype(np.float64) ** 2).sum()) or 1.0
        error = (float(((near - values).astype(np.float64) ** 2).sum()) / size) ** 0.5
        report.layers.append((name, own.name, error))
        found[name] = Stored(name, tensor.shape, own, raw)
        tensor.drop()
        tell("quantise", number + 1, len(files.tensors))
    return found


def _as_q4_1(
    model: Decoder, names: Names, number: int, layers: Sequence[Rounding]
) -> Mapping[str, Stored]:
    """A block's tensors: codes with a scale and a minimum for 32 columns, rows in their order."""
    rounded = {f"{one.name}.weight": one for one in layers}
    form, found = format_of("Q4_1"), {}
    for path, parameter in model.blocks[number].named_parameters():
        ours = f"blocks.{number}.{path}"
        name, source = _theirs(names, ours), names.pick(ours)
        assert source is not None
        if path not in rounded:
            plain = np.array(parameter.numpy(), np.float32)
            found[name] = Stored(name, plain.shape, format_of("F32"), format_of("F32").pack(plain))
            continue
        one = rounded[path]
        order = Rows(names, ours, source).rows
        raw = np.empty((one.shape[0], form.row_bytes(one.shape[1])), np.uint8)
        raw[order] = _q4_1_of(one)
        found[name] = Stored(name, one.shape, form, raw)
    return found


def _q4_1_of(one: Rounding) -> Array:
    """Bytes of Q4_1 of whole numbers of 4 bits above a zero point, in groups of 32."""
    fields = one.format.split(one.raw)
    nibbles = fields["codes"]  # (rows, groups, 16), the low nibble the even element
    codes = np.stack([nibbles & 15, nibbles >> 4], -1).reshape(*nibbles.shape[:2], 2, 16)
    halves = codes[..., 0, :] | (codes[..., 1, :] << np.uint8(4))
    scale = fields["scale"]
    minimum = -(scale.astype(np.float32) * fields["zero"].astype(np.float32))
    parts = [scale.view(np.uint8), minimum.astype(np.float16).view(np.uint8), halves]
    return np.concatenate([np.ascontiguousarray(p) for p in parts], -1).reshape(len(scale), -1)


__all__ = ["Report", "Wanted", "quantise_model"]
