"""From the name of a model to what runs: its decoder with weights, its tokenizer, its defaults.

Weights are mapped. Quantised ones stay in the file, and are prepared for the device when the first
step runs; plain ones of the dtype that is computed in stay where they are on a CPU, and go to a GPU
one by one. Invariant: nothing of a model's files is run; what they leave open (dtype, how to pick
tokens) is settled here, in one place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core import dtype as dtypes
from ..core.dtype import DType, dtype_of
from ..core.errors import UserError
from ..core.format import format_of
from ..exchange.composed import Composed, Rounded
from ..exchange.fetch import Progress, open_model
from ..exchange.folder import ModelFolder, read_table
from ..exchange.gguf import GgufFile
from ..exchange.mapped import Stored
from ..models.decoder.config import DecoderConfig
from ..models.decoder.eagle import EagleHead
from ..models.decoder.fields import Fields
from ..models.decoder.model import Decoder, Experts
from ..models.decoder.names import Names
from ..models.tokens.absent import NoTokenizer
from ..models.tokens.tokenizer import Tokenizer
from ..nn import Linear, init
from ..quant import quantise_rows
from ..runtime.buffer import HOST
from ..runtime.device import device as opened
from ..tensor.random import get_rng_state, manual_seed, set_rng_state
from ..tensor.stored import bytes_to_prepare
from .sampling_limits import Sampling
from .steps import Tell

MODELOPT = "hf_quant_config.json"  # what ModelOpt writes beside config.json
COPIED_BYTES = 1 << 20  # at most: their page of the file would hold their neighbours too
QUANTIZATION = ("fp8", "int8")  # what plain weights may be rounded to as they are loaded
FP8 = "E4M3_ROW_F32"  # a scale for each row of weights, and for each token
UNROUNDED = ("router", "shared_gate")  # few bytes, and they choose
CPU_SHARE, GPU_SHARE = 0.25, 0.85  # of all memory, of what is free: for keys and values


@dataclass(frozen=True)
class Loaded:
    """A model that can run, and what its files say of how to."""

    path: str
    model: Decoder
    tokenizer: Tokenizer
    defaults: dict[str, Any]  # fields of Sampling
    file_bytes: int
    cache: CacheFacts | None = None


@dataclass(frozen=True)
class CacheFacts:
    """What a model's files say of keys and values in 8 bits: see `generate.cache`."""

    scheme: Any
    scales: Mapping[str, Stored]


def load_model(
    name: str | os.PathLike[str],
    device: str,
    dtype: Any,
    tell: Tell,
    context: int | None = None,
    quantization: str | None = None,
    random_weights: bool = False,
) -> Loaded:
    """Open a model, build its decoder on a device and give it its weights, or drawn ones; with
    `quantization` weights and inputs of linear layers are rounded to "fp8" or "int8"."""
    if quantization not in (None, *QUANTIZATION):
        given = repr(quantization)
        raise UserError("no such quantization", op="LLM", expected=QUANTIZATION, got=given)
    if quantization == "fp8" and random_weights:
        raise UserError("fp8 is made of a file's weights", op="LLM", hint="no random weights")

    def report(progress: Progress) -> None:
        tell(progress.stage, progress.done, progress.total)

    files = open_model(name, report, weights=not random_weights)
    config = config_of(files, context)
    defaults, ends = defaults_of(files), ends_of(files, config)
    tokenizer = tokenizer_of(files, ends)
    if dtype is not None:
        wanted = dtype_of(dtype)
    elif random_weights:
        wanted = dtypes.float32 if device == HOST else dtypes.bfloat16
    else:
        wanted = dtype_for(files.tensors, device)
    if not wanted.is_float:
        raise UserError(
            "a model computes in floats",
            op="LLM",
            got=wanted,
            expected="float32, bfloat16 or float16",
        )
    if random_weights:
        model = _drawn(config, wanted, device, tell)
        size = bytes_of(model)
    else:
        with init.skipped():
            model = Decoder(config, wanted).requires_grad_(False).eval()
        tensors = files.tensors
        if quantization == "fp8":
            tensors = {**tensors, **in_fp8(model, config, tensors)}
        model.load(Weights(tensors, wanted, tell), keep="quantised", device=device)
        size = sum(stored.bytes for stored in files.tensors.values())
    if quantization == "int8":
        quantise_rows(model)
    if device != HOST:
        model.to(device=device)
    for stored in files.tensors.values():
        if device != HOST or stored.format.quantised or stored.bytes <= COPIED_BYTES:
            stored.drop()
    return Loaded(files.path, model, tokenizer, defaults, size, cache_facts(files))


def in_fp8(
    model: Decoder, config: DecoderConfig, tensors: Mapping[str, Stored | Composed]
) -> dict[str, Composed]:
    """The weights of a file that a decoder's blocks multiply by, as fp8 made when they are read.
    Those that lie transposed stay as they are."""
    names, form, found = Names(config, tensors), format_of(FP8), {}
    wanted = []
    for path, module in model.named_modules():
        if isinstance(module, Linear) and path.rpartition(".")[2] not in UNROUNDED:
            wanted += [f"{path}.weight"] if path.startswith("blocks.") else []
        elif isinstance(module, Experts):
            wanted += [f"{path}.{part}" for part in ("gate", "up", "down")]
    for source in map(names.pick, wanted):
        if source is None or source.transposed:
            continue
        for name in names.given_names(source):
            plain = tensors[name]
            if not isinstance(plain, Stored) or plain.format.quantised:
                raise UserError(
                    "fp8 is made of plain weights",
                    op="LLM(quantization=...)",
                    expected="a model that is not quantised",
                    got=f"{name} in {plain.format}",
                )

            def packed(plain: Stored = plain) -> np.ndarray[Any, Any]:
                return form.pack(np.asarray(plain.array(), np.float32))

            found[name] = Composed(name, plain.shape, form, (plain,), packed, input=Rounded(FP8))
    return found


def _drawn(config: DecoderConfig, dtype: DType, device: str, tell: Tell) -> Decoder:
    """A decoder whose weights are drawn on its device, the same ones every time."""
    before = get_rng_state()
    manual_seed(0)
    try:
        model = Decoder(config, dtype).requires_grad_(False).eval()
    finally:
        set_rng_state(before)
    if device != HOST:
        model.to(device=device)
    done, total = 0, bytes_of(model)
    for parameter in model.parameters():
        parameter.realize()
        done += parameter.numel() * parameter.dtype.size
        tell("load", done, total)
    return model


def cache_facts(files: GgufFile | ModelFolder) -> CacheFacts | None:
    """What files say of keys and values; None where they say nothing."""
    if isinstance(files, GgufFile):
        return None
    modelopt = read_table(Path(files.path) / MODELOPT) or {}
    scheme = None
    for table in (files.config.get("quantization_config"), modelopt.get("quantization")):
        if scheme is None and isinstance(table, Mapping):
            scheme = table.get("kv_cache_scheme") or table.get("kv_cache_quant_algo")
    if scheme is None and not files.cache_scales:
        return None
    return CacheFacts(scheme, files.cache_scales)


def bytes_of(model: Decoder) -> int:
    """Bytes of a model's weights, as they are computed with."""
    return sum(p.numel() * p.dtype.size for p in model.parameters())


def config_of(files: GgufFile | ModelFolder, context: int | None = None) -> DecoderConfig:
    """The DecoderConfig of a model's files; of a longer context if it is asked for and can be."""
    if isinstance(files, GgufFile):
        return DecoderConfig.from_gguf(files.metadata, files.tensors)
    found = DecoderConfig.from_huggingface(files.config)
    if context is not None and found.context < context and found.context < found.longest:
        return DecoderConfig.from_huggingface(files.config, min(context, found.longest))
    return found


def tokenizer_of(files: GgufFile | ModelFolder, ends: Sequence[int] = ()) -> Tokenizer:
    """The Tokenizer of a model's files; one without words, but with ends, where there is none."""
    if isinstance(files, GgufFile):
        if "tokenizer.ggml.model" in files.metadata:
            return Tokenizer.from_gguf(files.metadata)
        return NoTokenizer(f"tokenizer.ggml.model in {files.path}", ends)
    if files.tokenizer is not None:
        return Tokenizer.from_folder(Path(files.path))
    folder = Path(files.path)
    others = [name for name in OTHER_TOKENIZERS if (folder / name).is_file()]
    return NoTokenizer(str(folder / "tokenizer.json"), ends, others)


def dtype_for(tensors: Mapping[str, Stored | Composed], device: str) -> DType:
    """What a model computes in if nobody says: the dtype most of its weights have.

    Quantised weights leave it open: float32 on a CPU, where it costs nothing, else bfloat16.
    """
    if not tensors:
        raise UserError("the model has no weights", op="LLM", expected="tensors", got="none")
    sizes: dict[DType | None, int] = {}
    for stored in tensors.values():
        kind = stored.format.dtype
        sizes[kind] = sizes.get(kind, 0) + stored.bytes
    most = max(sizes, key=lambda kind: sizes[kind])
    plain = most is not None and most.is_float
    if device == HOST:
        return most if plain and most is not None and most.size in (2, 4) else dtypes.float32
    return most if plain and most is not None and most.size == 2 else dtypes.bfloat16


class Weights(Mapping[str, Any]):
    """Plain tensors as arrays of one dtype, made when they are asked for; quantised ones as they
    are stored."""

    def __init__(self, tensors: Mapping[str, Stored | Composed], dtype: DType, tell: Tell) -> None:
        self.tensors, self.dtype, self.tell = tensors, dtype, tell
        plain = [s.bytes for s in tensors.values() if not s.format.quantised]
        self.done, self.total = 0, sum(plain)

    def __getitem__(self, name: str) -> Any:
        stored = self.tensors[name]
        if stored.format.quantised:
            return stored
        self.done += stored.bytes
        self.tell("load", min(self.done, self.total), self.total)
        array = stored.array()
        if stored.bytes <= COPIED_BYTES:
            return np.array(array, self.dtype.numpy)
        return array if stored.format.dtype is self.dtype else array.astype(self.dtype.numpy)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __len__(self) -> int:
        return len(self.tensors)


# ---- how to pick tokens -------------------------------------------------------------------------

SHARED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}  # where they differ
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "merges.txt", "spiece.model")


def defaults_of(files: GgufFile | ModelFolder) -> dict[str, Any]:
    """Fields of Sampling that the model's own files ask for; none: the likeliest token.

    Every one of them is checked, used or not.
    """
    if isinstance(files, GgufFile):
        said = {
            name: files.metadata.get(f"general.sampling.{GGUF_NAMES.get(name, name)}")
            for name in SHARED
        }
        fields = Fields(said, f"{files.path}: general.sampling")
        return {name: _setting(fields, name) for name in SHARED if said[name] is not None}
    fields = Fields(files.generation, f"{files.path}/generation_config.json")
    given = {name: _setting(fields, name) for name in SHARED if fields.get(name) is not None}
    if fields.flag("do_sample", False):
        return {"temperature": 1.0, "top_k": 50, **given}  # what that library means by it
    return {name: given[name] for name in ("repetition_penalty",) if name in given}


def _setting(fields: Fields, name: str) -> Any:
    """One field that Sampling takes."""
    value = fields.whole(name) if name == "top_k" else fields.number(name)
    try:
        given: dict[str, Any] = {name: value}
        Sampling(**given)
    except UserError as error:
        raise fields.wrong(name, error.expected, value) from None
    return value


def ends_of(files: GgufFile | ModelFolder, config: DecoderConfig) -> list[int]:
    """Ids that end an answer, as the model's files say without a tokenizer.

    Those of generation_config.json are for this alone, and checked.
    """

    def listed(said: Any) -> list[Any]:
        return said if isinstance(said, list) else [] if said is None else [said]

    def is_id(i: Any) -> bool:
        whole = isinstance(i, (int, np.integer)) and not isinstance(i, bool)
        return whole and 0 <= i < config.vocabulary

    if isinstance(files, GgufFile):
        named: list[Any] = [
            files.metadata.get(f"tokenizer.ggml.{n}_token_id") for n in ("eos", "eot")
        ]
        return [int(i) for i in named if is_id(i)]
    fields = Fields(files.generation, f"{files.path}/generation_config.json")
    said = listed(fields.get("eos_token_id"))
    for i in said:
        if not is_id(i):
            raise fields.wrong("eos_token_id", f"ids from 0 to {config.vocabulary - 1}", i)
    return said or [i for i in listed(files.config.get("eos_token_id")) if is_id(i)]


# ---- how long ----------------------------------------------------------------------------------


def room_for(
    model: Decoder,
    device: str,
    cache: DType,
    requests: int,
    context: int | None,
    page: int,
    draft: Decoder | EagleHead | None = None,
) -> tuple[int, int]:
    """The context, and how many pages memory has for it: whole contexts of all requests at most.

    Keys and values of a CPU cost memory only where they are touched. A draft has as many pages of
    its own.
    """
    config = model.config
    models: list[Decoder | EagleHead] = [model] if draft is None else [model, draft]
    kept = (cache, model.norm.weight.dtype)  # a draft's in the dtype that is computed in
    token = sum(
        2 * m.config.layers * m.config.key_heads * m.config.head_width * dtype.size
        for m, dtype in zip(models, kept)
    )
    memory = (
        CPU_SHARE * _physical()
        if device == HOST
        else GPU_SHARE
        * (
            opened(device).memory_info()[0]
            - sum(bytes_to_prepare(m.parameters(), device) for m in models)
        )
    )
    fitting = int(memory // (token * page))
    if device != HOST:  # what is free changes a little all the time, and kernels know the number
        fitting -= fitting % (1 << max(0, fitting.bit_length() - 6))
    wanted = min(context, config.context) if context else config.context
    if context and -(-wanted // page) > fitting:
        raise UserError(
            "memory cannot hold the context",
            op="LLM",
            got=f"context={context}",
            expected=f"at most {fitting * page} tokens of {token} bytes",
        )
    if not fitting:
        raise UserError(
            "memory cannot hold keys and values",
            op="LLM",
            expected=f"{token * page} bytes at least",
            got=int(memory),
        )
    found = min(wanted, fitting * page)
    return found, min(fitting, requests * -(-found // page))


def _physical() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 8 << 30


__all__ = ["Loaded", "Weights", "config_of", "defaults_of", "load_model", "room_for"]
