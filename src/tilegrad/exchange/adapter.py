"""Low-rank adapters (LoRA) in the layout that PEFT publishes: a configuration and safetensors.

`adapter_config.json` says rank, scale and kind, `adapter_model.safetensors` has two tensors for
each module that is changed: NAME.lora_A.weight (rank, in) and NAME.lora_B.weight (out, rank). The
module's weight W stands for W + scale * B @ A. The tensors tell which modules those are; patterns
of the configuration are never run, since a file could choose one that takes forever.
Invariant: whatever is in the folder, reading ends in an `Adapter` whose pairs fit together and are
finite, or in a `UserError` that names the file and the field or tensor.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..core.errors import UserError
from .folder import read_table
from .mapped import Stored
from .safetensors import read_safetensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
START = "base_model.model."
TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight\Z")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]{1,512}\Z")
LARGEST_RANK = 4096
# Fields that make the weights another function than W + scale * B @ A, and what they may be.
REFUSED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
}
# Ways to begin training that also change the base's weights.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
Pair = tuple[Stored, Stored, float]


@dataclass(frozen=True)
class Adapter:
    """An adapter's tensors, mapped: for each module A (rank, in), B (out, rank) and the scale."""

    path: str
    pairs: dict[str, Pair] = field(repr=False)  # by the module's name in the base model


def read_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Read an adapter's folder."""
    folder = Path(path)
    if not folder.is_dir():
        raise UserError("no such folder", op="adapter", got=os.fspath(path))
    config = read_table(folder / CONFIG)
    if config is None:
        found = sorted(p.name for p in folder.iterdir())[:8]
        raise UserError(
            f"{folder}: {CONFIG} is missing", op="adapter", got=", ".join(found) or "nothing"
        )
    said = _Said(folder / CONFIG, config)
    said.check()
    weights = folder / WEIGHTS
    if not weights.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        raise UserError(
            f"{folder}: {WEIGHTS} is missing",
            op="adapter",
            hint="adapter_model.bin is a pickle, which is not read" if pickled else None,
        )
    return Adapter(os.fspath(path), _pairs(said, str(weights), read_safetensors(weights)))


class _Said:
    """What a configuration says."""

    def __init__(self, path: Path, given: Mapping[str, Any]) -> None:
        self.path, self.given = path, given

    def fail(self, name: str, expected: str, hint: str | None = None) -> NoReturn:
        got = repr(self.given.get(name))[:100]
        raise UserError(f"{self.path}: {name}", op="adapter", expected=expected, got=got, hint=hint)

    def check(self) -> None:
        """Refuse what is not W + scale * B @ A."""
        if self.given.get("peft_type") != "LORA":
            self.fail("peft_type", "LORA")
        if self.given.get("bias", "none") != "none":
            self.fail("bias", "none: an adapter with biases of its own is not served")
        for name, taken in REFUSED.items():
            if not any(self.given.get(name) is t or self.given.get(name) == t for t in taken):
                self.fail(name, "nothing: only W + scale * B @ A is served")
        start = self.given.get("init_lora_weights", True)
        if isinstance(start, str) and start.startswith(CHANGES_BASE):
            self.fail(
                "init_lora_weights",
                "a start that leaves the base model as it is",
                hint="PEFT can save such an adapter converted to a plain one",
            )
        if not isinstance(self.given.get("use_rslora", False), bool):
            self.fail("use_rslora", "true or false")
        self.whole("r")
        self.number("lora_alpha")
        targets = self.given.get("target_modules")
        listed = isinstance(targets, list) and all(isinstance(t, str) for t in targets)
        if not listed and not isinstance(targets, str) and targets is not None:
            self.fail("target_modules", "a list of names, or a pattern")
        for name in ("rank_pattern", "alpha_pattern"):
            self.pattern(name)

    def whole(self, name: str) -> int:
        value = self.given.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LARGEST_RANK:
            self.fail(name, f"a whole number from 1 to {LARGEST_RANK}")
        return value

    def number(self, name: str) -> float:
        return self.finite(name, self.given.get(name))

    def finite(self, name: str, value: Any) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or abs(value) > 1e6:
            self.fail(name, "a number, at most 1e6")
        return float(value)

    def pattern(self, name: str) -> dict[str, Any]:
        """Numbers for modules whose names end so."""
        found = self.given.get(name) or {}
        if not isinstance(found, dict):
            self.fail(name, "a table")
        for key, value in found.items():
            if not PLAIN_NAME.match(key):
                self.fail(name, "ends of names; patterns are not run")
            self.finite(name, value)
        return found

    def of(self, name: str, module: str, default: float) -> float:
        """What a pattern says of a module."""
        for key, value in self.pattern(name).items():
            if module == key or module.endswith("." + key):
                return float(value)
        return default

    def scale(self, module: str, rank: int) -> float:
        """What B @ A is multiplied with."""
        alpha = self.of("alpha_pattern", module, self.number("lora_alpha"))
        return alpha / (math.sqrt(rank) if self.given.get("use_rslora", False) else rank)

    def targets(self, module: str) -> bool:
        """Whether a list of modules has this one; a pattern is not asked."""
        listed = self.given.get("target_modules")
        if not isinstance(listed, list):
            return True
        return any(module == t or module.endswith("." + t) for t in listed)


def _pairs(said: _Said, path: str, tensors: Mapping[str, Stored]) -> dict[str, Pair]:
    sides: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items():
        match = TENSOR.match(name.removeprefix(START))
        if match is None:
            _wrong(path, name, "NAME.lora_A.weight or NAME.lora_B.weight", _kind(name))
        _check_values(path, name, stored)
        sides.setdefault(match["module"], {})[match["side"]] = stored
    if not sides:
        raise UserError(f"{path}: the adapter has no tensors", op="adapter", expected="lora_A")
    pairs = {}
    for module, found in sides.items():
        if len(found) < 2:
            other = "B" if "A" in found else "A"
            _wrong(path, f"{START}{module}.lora_{other}.weight", "a tensor", "none")
        if not said.targets(module):
            _wrong(path, module, f"a module of target_modules in {said.path}", "another")
        a, b = found["A"], found["B"]
        wanted = int(said.of("rank_pattern", module, said.whole("r")))
        for stored, axis in ((a, 0), (b, 1)):
            if len(stored.shape) != 2 or stored.shape[axis] != wanted:
                sizes = f"({wanted}, in)" if axis == 0 else f"(out, {wanted})"
                _wrong(path, stored.name, f"{sizes}, as the rank is {wanted}", stored.shape)
        pairs[module] = (a, b, said.scale(module, wanted))
    missing = [t for t in _listed(said) if not any(_ends(m, t) for m in pairs)]
    if missing:
        said.fail("target_modules", f"modules that {WEIGHTS} has; it has no {missing[0][:100]}")
    return pairs


def _listed(said: _Said) -> list[str]:
    found = said.given.get("target_modules")
    return found if isinstance(found, list) else []


def _ends(module: str, name: str) -> bool:
    return module == name or module.endswith("." + name)


def _check_values(path: str, name: str, stored: Stored) -> None:
    dtype = stored.format.dtype
    if dtype is None or not dtype.is_float or dtype.size not in (2, 4):
        _wrong(path, name, "float32, float16 or bfloat16", stored.format.name)
    values = stored.array()
    if not np.isfinite(values.astype(np.float32)).all():
        _wrong(path, name, "finite numbers", "NaN or infinity")


def _kind(name: str) -> str:
    """What a tensor is that cannot be served, if that is known."""
    if "lora_magnitude_vector" in name:
        return "a magnitude: this is DoRA, which is not served"
    if "lora_embedding" in name:
        return "an adapter of embeddings, which is not served"
    return "another name"


def _wrong(path: str, name: str, expected: object, got: object) -> NoReturn:
    raise UserError(
        f"{path}: tensor {name[:200]!r}", op="adapter", expected=expected, got=str(got)[:200]
    )


__all__ = ["Adapter", "read_adapter"]
