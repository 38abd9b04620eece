"""`tilegrad info`: what a model is, what memory it needs, and about how fast it is here.

Weights are not loaded: the tables of the files say it all. Invariant: every number follows from
the files, the options and the Rate that is named beside it; the speed is an estimate, not a limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ..core.errors import UserError
from . import options
from .progress import Bars
from .terminal import columns, count_text, put, size_text

EXPERT = re.compile(r"(?:_exps\.weight|\.experts\.)")
# Tables of which a token reads one row. A tied embedding is the head too, and is read whole.
EMBEDDINGS = (
    "token_embd.weight",
    "model.embed_tokens.weight",
    "wte.weight",
    "transformer.wte.weight",
)
POSITIONS = ("position_embd.weight", "wpe.weight", "transformer.wpe.weight")
Measure = Annotated[bool, typer.Option("--measure", help="Measure the memory's speed anew.")]


def info(
    model: options.Model,
    context: options.Context = None,
    device: options.Device = None,
    dtype: options.DType = None,
    kv_cache_dtype: options.KvCacheDType = None,
    threads: options.Threads = None,
    measure: Measure = False,
    as_json: options.Json = False,
) -> None:
    """Show a model's sizes and formats, the memory it needs and the speed to expect here."""
    from ..core.config import set_threads
    from ..exchange.fetch import open_model
    from ..tensor.placement import default_device, use

    if threads is not None:
        set_threads(threads)
    with Bars() as bars:
        opened = open_model(model, bars.report)
        where = use(device, "info") if device else default_device()
    record = describe(opened, context, dtype, where, kv_cache_dtype or "auto")
    if "needs" in record:
        record["speed"] = speed(record["needs"], where, measure)
    put(json.dumps(record) if as_json else columns(lines(record)))


@dataclass(frozen=True)
class Needs:
    """Bytes of a decoder: its weights, those a token reads, and what a token of context adds."""

    weights: int
    weights_a_token: int
    cache_a_token: int

    def total(self, context: int) -> int:
        """Bytes of the weights and of a full cache."""
        return self.weights + self.cache_a_token * context

    def moved(self, context: int) -> int:
        """Bytes that a step reads with so many tokens in the cache."""
        return self.weights_a_token + self.cache_a_token * context


def describe(
    opened: Any, context: int | None, dtype: str | None, device: str, cache: str = "auto"
) -> dict[str, Any]:
    """What the files of a model say, as a record."""
    tensors = opened.tensors
    record: dict[str, Any] = {
        "name": name_of(opened),
        "path": str(opened.path),
        "licence": licence_of(opened),
        "parameters": sum(_elements(t) for t in tensors.values()),
        "bytes": sum(t.bytes for t in tensors.values()),
        "formats": formats_of(tensors),
    }
    from ..core.dtype import dtype_of
    from ..generate.load import config_of, dtype_for

    own = dtype_of(dtype) if dtype else dtype_for(tensors, device)
    try:
        config = config_of(opened)
        kept, how = cache_of(opened, cache, own)
    except UserError as error:
        return record | {"cannot_run": str(error).splitlines()[0]}
    most = min(context or config.context, config.context)
    wide = unpacked_in(config, tensors, device)
    needs = needs_of(config, tensors, own, device, kept, wide)
    return record | {
        "formats": formats_of(tensors, wide),
        "architecture": config.family,
        "layers": config.layers,
        "width": config.width,
        "heads": config.heads,
        "key_heads": config.key_heads,
        "vocabulary": config.vocabulary,
        "experts": config.experts,
        "experts_used": config.experts_used,
        "trained_context": config.context,
        "context": most,
        "kv_cache": how,
        "needs": {
            "weights": needs.weights,
            "cache": needs.cache_a_token * most,
            "cache_a_token": needs.cache_a_token,
            "total": needs.total(most),
            "read_first": needs.moved(0),
            "read_full": needs.moved(most),
        },
    }


def cache_of(opened: Any, wanted: str, own: Any) -> tuple[Any, str]:
    """What keys and values are kept in of a model that computes in its own dtype, and how that
    came about."""
    from ..generate.load import cache_facts

    facts = cache_facts(opened)
    if wanted == "auto" and facts is None:
        return own, ""
    from ..generate.cache import WORDS, kept_in

    kept = kept_in(wanted, own, facts)
    if kept not in WORDS:
        return kept, ""
    of_files = facts is not None and facts.scales
    scales = "of the files" if of_files else "1.0" if WORDS[kept] == "fp8" else "calibrated"
    return kept, f"{WORDS[kept]}, scales {scales}"


def needs_of(
    config: Any,
    tensors: Any,
    dtype: Any,
    device: str,
    cache: Any = None,
    unpacked: Collection[str] = (),
) -> Needs:
    """Bytes of weights and of the cache: plain weights, keys and values are kept in `dtype`, as are
    those that are unpacked, or keys and values in another one."""
    from ..core.dtype import dtype_of
    from ..generate.load import dtype_for

    kept = dtype_of(dtype) if dtype else dtype_for(tensors, device)
    whole = read = 0
    for name, tensor in tensors.items():
        stays = tensor.format.quantised and name not in unpacked
        size = tensor.bytes if stays else _elements(tensor) * kept.size
        whole += size
        if name in POSITIONS or (name in EMBEDDINGS and not config.tied):
            size //= max(tensor.shape[0], 1)
        elif EXPERT.search(name) and config.experts:
            size = size * config.experts_used // config.experts
        read += size
    heads = 2 * config.layers * config.key_heads * config.head_width  # keys and values
    return Needs(whole, read, heads * (cache or kept).size)


def speed(needs: dict[str, int], device: str, fresh: bool) -> dict[str, Any]:
    """About how many tokens a second the memory of a device allows."""
    from ..serve.engine.roofline import read_rate

    rate = read_rate(device, needs["read_first"], fresh)
    first, full = (rate.bytes_per_second / needs[n] for n in ("read_first", "read_full"))
    return {
        "device": device,
        "bytes_per_second": round(rate.bytes_per_second),
        "how": rate.how,
        "busy": rate.busy,
        "tokens_per_second": round(first, 2),
        "tokens_per_second_full": round(full, 2),
    }


# ---- words --------------------------------------------------------------------------------------


def name_of(opened: Any) -> str:
    """A model's own name."""
    if hasattr(opened, "metadata"):
        return str(opened.get("general.name", str, "unnamed"))[:120]
    return str(opened.config.get("_name_or_path") or opened.path)[-120:]


def licence_of(opened: Any) -> str:
    """A model's licence, where its files say."""
    if not hasattr(opened, "metadata"):
        return "see its folder"
    return str(opened.get("general.license", str, "not said in the file"))[:120]


def unpacked_in(config: Any, tensors: Any, device: str) -> set[str]:
    """Tensors of experts that are quantised, and are not on the device."""
    from ..models.decoder.names import Names

    found = Names(config, tensors, device).unpacked() if config.experts else ()
    return {name for _, names in found for name in names}


def formats_of(tensors: Any, unpacked: Collection[str] = ()) -> dict[str, dict[str, int]]:
    """Count and bytes of the tensors by Format, the largest first, how many are experts', and how
    many of those are unpacked."""
    found: dict[str, dict[str, int]] = {}
    for name, tensor in tensors.items():
        entry = found.setdefault(str(tensor.format), {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.bytes
        if EXPERT.search(name):
            entry["experts"] = entry.get("experts", 0) + 1
        if name in unpacked:
            entry["unpacked"] = entry.get("unpacked", 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1]["bytes"]))


def lines(record: dict[str, Any]) -> list[tuple[str, str]]:
    """A record as (word, text)."""
    found = [
        ("model", record["name"]),
        ("files", record["path"]),
        ("licence", record["licence"]),
        ("parameters", count_text(record["parameters"])),
        ("weights", size_text(record["bytes"])),
    ]
    found += [
        ("", f"{name}: {size_text(e['bytes'])} in {_tensors(e['tensors'])}{_of_experts(e)}")
        for name, e in record["formats"].items()
    ]
    if "cannot_run" in record:
        return [*found, ("cannot run", record["cannot_run"])]
    experts = f", {record['experts_used']} of {record['experts']} experts"
    found += [
        (
            "decoder",
            f"{record['architecture']}: {record['layers']} layers, width "
            f"{record['width']}, {record['heads']} heads ({record['key_heads']} for keys), "
            f"{record['vocabulary']} tokens{experts if record['experts'] else ''}",
        ),
        ("context", f"{record['trained_context']} tokens"),
    ]
    kept = record["kv_cache"]
    needs, speeds, most = record["needs"], record.get("speed"), record["context"]
    found.append(
        (
            "memory",
            f"{size_text(needs['total'])}: weights {size_text(needs['weights'])}, "
            f"cache {size_text(needs['cache'])} ({most} tokens of "
            f"{size_text(needs['cache_a_token'])}{', ' * bool(kept)}{kept})",
        )
    )
    if speeds:
        rate = size_text(speeds["bytes_per_second"])
        found += [
            ("machine", f"{speeds['device']} reads {rate}/s ({speeds['how']})"),
            (
                "speed",
                f"about {speeds['tokens_per_second']:.1f} tokens/s "
                f"({size_text(needs['read_first'])} a token at that rate), "
                f"{speeds['tokens_per_second_full']:.1f} with {most} tokens in the cache",
            ),
        ]
        if speeds["busy"]:
            found.append(("", "the machine is busy: an idle one is faster"))
    return found


def _elements(tensor: Any) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count


def _of_experts(entry: dict[str, int]) -> str:
    count = entry.get("experts", 0)
    whose = "all" if count == entry["tensors"] else str(count)
    unpacked = ", unpacked when they are loaded" if entry.get("unpacked") else ""
    return f", {whose} of experts{unpacked}" if count else ""


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"
