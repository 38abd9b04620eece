"""Models quantised a block at a time: what comes in is seen, weights are rounded, on it goes.

A block runs on all samples with Recorders before its layers; then its layers are rounded by a
recipe, and it runs again on the same samples, so that what follows is fitted to what it will get.
Invariant: beside the samples as they are between two blocks, memory is that of one block: results
are handed out block by block (`keep`), and the block reads them from there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..core.dtype import float32
from ..core.errors import UserError
from ..core.format import Format, format_of
from ..nn.linear import Linear
from ..nn.module import Module
from ..tensor.creation import tensor
from ..tensor.stored import stored
from ..tensor.tensor import Tensor, lift, no_grad, realize
from . import prune, recipes
from .calibrate import put
from .layers import PackedLinear

Array = np.ndarray[Any, Any]
SAMPLE = 256  # rows of inputs that SmoothQuant is judged by
INT8, FP8, SPARSE = "INT8_ROW_F32", "E4M3_ROW_F32", "BF16_SPARSE"
OF_WEIGHTS = ("int4", "searched-int4", "gptq-int4", "awq-int4", "awq-gptq-int4")
RECIPES = (*OF_WEIGHTS, "int8", "plain-int8", "fp8", "2:4", "magnitude-2:4")
WORD = re.compile(
    r"(|searched-|gptq-|awq-|awq-gptq-)int[2-8]\Z|plain-int8\Z|fp8\Z|(magnitude-)?2:4\Z"
)
METHODS = {"int8": "smooth", "plain-int8": "rows", "fp8": "fp"}
METHODS |= {"2:4": "wanda", "magnitude-2:4": "magnitude"}


@dataclass(frozen=True)
class Recipe:
    """Which recipe, by the word that `tilegrad quantize --to` takes, with columns of a group.

    "int2" to "int7" are plain rounding, "gptq-int3" and its like another way to the same Formats;
    "int8" is SmoothQuant, "plain-int8" the same without its factors, "2:4" is Wanda.
    """

    name: str
    group: int = 128

    def __post_init__(self) -> None:
        if WORD.match(self.name) is None:
            expected = f"{', '.join(RECIPES)}; of other bits, as gptq-int3"
            raise UserError("no such recipe", op="quantise", expected=expected, got=self.name)

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 16 if self.name.endswith("2:4") else int(self.name[-1])

    @property
    def method(self) -> str:
        """plain, searched, gptq, awq or awq-gptq of weights alone; smooth, rows or fp of both;
        wanda or magnitude where weights are left out."""
        found = METHODS.get(self.name) or self.name[: self.name.index("int")] or "plain-"
        return found.removesuffix("-")

    @property
    def needs_samples(self) -> bool:
        """Whether it looks at what comes in."""
        return self.method not in ("plain", "rows", "fp", "magnitude")

    @property
    def input_format(self) -> str:
        """How inputs are rounded; '' for not at all."""
        return {"smooth": INT8, "rows": INT8, "fp": FP8}.get(self.method, "")


@dataclass(frozen=True)
class Shared:
    """Layers that read the same input, and what gives it: a norm or a layer, whose results may be
    divided by factors that these layers' weights are multiplied with."""

    layers: tuple[str, ...]
    before: str = ""
    offset: float = 0.0  # that a norm adds to its weight


@dataclass
class Seen:
    """What came in: sums of products, sizes, and some rows."""

    products: Array
    sizes: Array
    most: Array
    count: int = 0
    rows: list[Array] = field(default_factory=list)

    def add(self, x: Array) -> None:
        """More rows (n, columns)."""
        size = np.abs(x)
        self.products += x.T @ x
        self.sizes += size.sum(0)
        self.most = np.maximum(self.most, size.max(0))
        left = SAMPLE - sum(map(len, self.rows))
        if left > 0:
            self.rows.append(x[:: max(1, len(x) // max(1, left // 4))][:left].copy())
        self.count += len(x)


@dataclass(frozen=True)
class Rounding:
    """One layer as it was rounded: bytes of a Format, and the share of its results it costs."""

    name: str
    format: Format
    raw: Array = field(repr=False)
    shape: tuple[int, int]
    error: float
    before: Array | None = field(default=None, repr=False)  # of GPTQ: what each was rounded from

    @staticmethod
    def of(
        name: str, form: Format, raw: Array, weight: Array, near: Array, products: Any = None
    ) -> Rounding:
        """Of weights and what they became; `products` is x.T @ x of the inputs, if known."""
        given = np.eye(weight.shape[1], dtype=np.float32) if products is None else products
        whole = recipes.loss(weight, given)
        error = 0.0 if whole <= 0 else (recipes.loss(near - weight, given) / whole) ** 0.5
        return Rounding(name, form, raw, (weight.shape[0], weight.shape[1]), error)

    @property
    def bytes(self) -> int:
        """Bytes that it takes."""
        return self.raw.nbytes

    def drop(self) -> None:
        """It is in memory."""


class Recorder(Module):
    """A layer, and what came in, for `seen_by`."""

    def __init__(self, layer: Module) -> None:
        super().__init__()
        self.layer = layer
        self.given: list[Tensor] = []

    def forward(self, x: Any) -> Any:
        """What the layer gives."""
        self.given.append(lift(x))
        return self.layer(x)


Run = Callable[[Tensor], Tensor]


def seen_by(block: Module, groups: Sequence[Shared], states: Sequence[Array], run: Run) -> Any:
    """What came into the layers of each group, over all samples."""
    firsts = [block.get_submodule(g.layers[0]) for g in groups]
    recorders = [Recorder(layer) for layer in firsts]
    found = [
        Seen(np.zeros((n, n), np.float32), np.zeros(n, np.float64), np.zeros(n, np.float32))
        for n in (layer.in_features for layer in firsts)
    ]
    try:
        for group, recorder in zip(groups, recorders):
            put(block, group.layers[0], recorder)
        for state in states:
            with no_grad():
                result = run(tensor(state))
                given = [r.given[0].to(float32) for r in recorders]
                realize([result, *given])
            for one, recorder, x in zip(found, recorders, given):
                one.add(x.numpy().reshape(-1, x.shape[-1]))
                recorder.given.clear()
    finally:
        for group, layer in zip(groups, firsts):
            put(block, group.layers[0], layer)
    return found


def round_block(
    block: Module,
    groups: Sequence[Shared],
    states: Sequence[Array],
    run: Run,
    recipe: Recipe,
    keep: Callable[[Rounding], Any] | None = None,
    each: Mapping[str, Recipe] | None = None,
) -> tuple[list[Array], list[Rounding]]:
    """The samples behind a block whose layers are rounded, and its layers; `each` has recipes of
    layers that are not rounded as the others."""
    own = {name: (each or {}).get(name, recipe) for group in groups for name in group.layers}
    seen = seen_by(block, groups, states, run) if states else [None] * len(groups)
    made: list[Rounding] = []
    with no_grad():
        for group, one in zip(groups, seen):
            _fold(block, group, one, own[group.layers[0]])
        for group, one in zip(groups, seen):
            for name in group.layers:
                done = _round(block, name, one, own[name])
                made.append(done)
                where = done if keep is None else keep(done)
                take(block, name, done if where is None else where, own[name].input_format)
    return [_result(run, state) for state in states], made


def _result(run: Run, state: Array) -> Array:
    with no_grad():
        return np.array(run(tensor(state)).to(float32).numpy())


def values_of(model: Module, name: str) -> Array:
    """The weights of a layer in float32, all of them finite."""
    layer: Any = model.get_submodule(name)
    return recipes.finite(name or "the layer", np.array(layer.weight.to(float32).numpy()))


def _fold(block: Module, group: Shared, seen: Seen | None, recipe: Recipe) -> None:
    """Take factors off what comes before and put them on the weights."""
    if seen is None or not group.before or recipe.method not in ("awq", "awq-gptq", "smooth"):
        return
    weights = [values_of(block, n) for n in group.layers]
    if recipe.method == "smooth":
        factors = recipes.smooth(weights, np.concatenate(seen.rows), seen.most)
    else:
        mean = (seen.sizes / max(1, seen.count)).astype(np.float32)
        factors = recipes.awq(weights, mean, seen.products, recipe.bits, recipe.group)
    for name, weight in zip(group.layers, weights):
        _assign(block.get_submodule(name), "weight", weight * factors)
    before: Any = block.get_submodule(group.before)
    whole = np.array(before.weight.to(float32).numpy())
    shape = (-1, *(1,) * (whole.ndim - 1))
    _assign(before, "weight", (whole + group.offset) / factors.reshape(shape) - group.offset)
    bias = getattr(before, "bias", None)
    if bias is not None:
        _assign(before, "bias", np.array(bias.to(float32).numpy()) / factors)
    seen.products /= np.outer(factors, factors)
    seen.sizes, seen.most = seen.sizes / factors, seen.most / factors


def _assign(layer: Module, name: str, value: Array) -> None:
    parameter: Any = getattr(layer, name)
    parameter.assign(tensor(value.astype(np.float32)).to(parameter.dtype))


def _round(block: Module, name: str, seen: Seen | None, recipe: Recipe) -> Rounding:
    weight = values_of(block, name)
    before = None
    if recipe.input_format or recipe.bits == 16:
        form = format_of(recipe.input_format or SPARSE)
        raw = form.pack(_pruned(weight, seen, recipe))
        near = form.to_float32(raw)
    else:
        coded = _coded(weight, seen, recipe)
        form, raw, near, before = coded.format, coded.raw(), coded.values(), coded.before
    products = None if seen is None else seen.products
    return replace(Rounding.of(name, form, raw, weight, near, products), before=before)


def _pruned(weight: Array, seen: Seen | None, recipe: Recipe) -> Array:
    """What stays of weights: all, or two of every four."""
    if recipe.method == "wanda":
        if seen is None:
            raise UserError("this recipe needs samples", op="quantise", got=recipe.name)
        return prune.wanda(weight, seen.products)
    return prune.magnitude(weight) if recipe.method == "magnitude" else weight


def _coded(weight: Array, seen: Seen | None, recipe: Recipe) -> recipes.Coded:
    if recipe.method == "plain":
        return recipes.plain(weight, recipe.bits, recipe.group)
    if seen is None:
        raise UserError("this recipe needs samples", op="quantise", got=recipe.name)
    if recipe.method in ("gptq", "awq-gptq"):
        return recipes.gptq(weight, seen.products, recipe.bits, recipe.group)
    importance = np.maximum(np.diag(seen.products), 1e-12)
    return recipes.searched(weight, recipe.bits, recipe.group, importance)


def take(model: Module, name: str, weights: Any, input_format: str = "") -> None:
    """Let a layer read what was made."""
    layer: Any = model.get_submodule(name)
    layer.weight.requires_grad = False
    layer.weight.node = stored(weights, layer.weight.dtype).node
    if type(layer) is not Linear or input_format:
        put(model, name, PackedLinear(layer, None, input_format))


__all__ = [
    "RECIPES",
    "WORD",
    "Recipe",
    "Rounding",
    "Seen",
    "Shared",
    "round_block",
    "seen_by",
    "take",
    "values_of",
]
