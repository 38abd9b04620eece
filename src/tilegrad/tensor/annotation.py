"""Typed shapes: `Tensor["B", "S", 64, bf16]`, checked when a function is called.

A name is a size that must be the same wherever the name occurs in one call, the result
included; an int is that size; `...` stands for any number of leading axes; a dtype comes last.
`jit` checks the annotations of its function, and `@typed` those of a plain one; `dynamic_axes`
says which sizes are Symbols. Invariant: a
check never changes a value; it raises with the argument, what was expected and what came.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..core.dtype import ALIASES, BY_NAME, DType, dtype_of
from ..core.errors import PACKAGE, DTypeError, ShapeError, UserError
from ..graph.build import show
from ..ir.symbol import Expr, Size, atoms, high, low, symbol

Function = TypeVar("Function", bound=Callable[..., Any])
Sizes = dict[str, tuple[Size, str]]  # the size of each name, and the argument that set it


class Annotation:
    """The shape and dtype that a Tensor must have."""

    __slots__ = ("dtype", "leading", "sizes")

    def __init__(self, leading: bool, sizes: tuple[Any, ...], dtype: DType | None) -> None:
        self.leading, self.sizes, self.dtype = leading, sizes, dtype

    def __repr__(self) -> str:
        parts = ["..."] if self.leading else []
        parts += [repr(s) if isinstance(s, str) else str(s) for s in self.sizes]
        parts += [self.dtype.name] if self.dtype is not None else []
        return f"Tensor[{', '.join(parts)}]"

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise UserError(
            f"{self!r} describes Tensors and does not make them",
            op="Tensor",
            hint="use Tensor(data) or zeros(...)",
        )

    def __or__(self, other: Any) -> Any:
        return self if other is None else NotImplemented  # Tensor[...] | None: None passes too

    def symbolic_axes(self, symbols: Mapping[str, Size]) -> dict[int, Size]:
        """The axes whose names have bounds, counted from the end after leading axes."""
        first = -len(self.sizes) if self.leading else 0
        return {
            first + i: symbols[s]
            for i, s in enumerate(self.sizes)
            if isinstance(s, str) and s in symbols
        } | {first + i: s for i, s in enumerate(self.sizes) if isinstance(s, Expr)}

    def check(self, function: str, name: str, value: Any, sizes: Sizes) -> None:
        """Raise unless the value fits; names met for the first time are added to sizes."""
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is None or dtype is None:
            raise DTypeError(
                f"{name} is not a Tensor", op=function, expected=self, got=type(value).__name__
            )
        got = f"{dtype_of(dtype).name} {show(tuple(shape))}"
        if self.dtype is not None and dtype_of(dtype) is not self.dtype:
            raise DTypeError(f"{name} has another dtype", op=function, expected=self, got=got)
        rank = len(self.sizes)
        if len(shape) < rank or (len(shape) != rank and not self.leading):
            raise ShapeError(
                f"{name} has another number of axes", op=function, expected=self, got=got
            )
        for axis, (want, size) in enumerate(zip(self.sizes, tuple(shape)[len(shape) - rank :])):
            self._check_size(function, name, axis + len(shape) - rank, want, size, got, sizes)

    def _check_size(
        self, function: str, name: str, axis: int, want: Any, size: Size, got: str, sizes: Sizes
    ) -> None:
        if isinstance(want, Expr) and want.kind == "symbol":
            if low(size) < want.low or high(size) > want.high:
                raise ShapeError(
                    f"{name} has another size on axis {axis}",
                    op=function,
                    got=got,
                    expected=f"{want.low} <= {want} <= {want.high}",
                )
            want = want.name
        if isinstance(want, str):
            before, where = sizes.setdefault(want, (size, name))
            if before == size:
                return
            expected = f"{self} with {want} = {before}, as in {where}"
        elif want == size:
            return
        else:
            expected = repr(self)
        raise ShapeError(
            f"{name} has another size on axis {axis}", op=function, expected=expected, got=got
        )


def annotation(items: Any) -> Annotation:
    """What `Tensor[...]` means: names, sizes, a leading `...` and a trailing dtype."""
    parts = list(items) if isinstance(items, tuple) else [items]
    dtype = None
    if parts and _is_dtype(parts[-1]):
        dtype = dtype_of(parts.pop())
    leading = bool(parts) and parts[0] in (Ellipsis, "...")
    sizes = parts[1:] if leading else parts
    for part in sizes:
        if isinstance(part, bool) or not isinstance(part, (str, int, Expr)):
            raise DTypeError(
                "an annotation is made of names, sizes and a dtype",
                op="Tensor[...]",
                expected='Tensor["B", 64, float32] or Tensor[..., "D"]',
                got=repr(part),
            )
    return Annotation(leading, tuple(sizes), dtype)


def _is_dtype(part: Any) -> bool:
    if isinstance(part, str):
        return part in BY_NAME or part in ALIASES
    return isinstance(part, DType) or (isinstance(part, type) and part is not type(Ellipsis))


def annotations_of(function: Callable[..., Any]) -> tuple[dict[str, Annotation], Annotation | None]:
    """The Tensor annotations of a function's parameters and of its result."""
    found: dict[str, Any] = {}
    for name, value in getattr(function, "__annotations__", {}).items():
        if isinstance(value, str):  # `from __future__ import annotations`
            value = _evaluated(function, value)
        if isinstance(value, Annotation):
            found[name] = value
    return found, found.pop("return", None)


def _evaluated(function: Callable[..., Any], text: str) -> Any:
    if "[" not in text:
        return None
    inner = inspect.unwrap(function)
    try:
        return eval(text, dict(getattr(inner, "__globals__", {})), _caller_names())
    except NameError as error:
        if text.startswith("Tensor["):
            raise UserError(
                f"the annotation {text} cannot be read: {error}",
                op="Tensor[...]",
                hint="define the names before the function",
            ) from None
        return None  # not one of ours
    except (AttributeError, SyntaxError, TypeError):
        return None


def _caller_names() -> dict[str, Any]:
    """The local names where the function is being decorated."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def check_call(
    function: str, arguments: Mapping[str, Any], wanted: Mapping[str, Annotation], sizes: Sizes
) -> Sizes:
    """Check arguments by name against annotations; None passes. Returns the sizes by name."""
    for name, value in arguments.items():
        if name in wanted and value is not None:
            label = name if name.startswith("the ") else f"argument {name}"
            wanted[name].check(function, label, value, sizes)
    return sizes


def typed(function: Function) -> Function:
    """Check the Tensor annotations of a function at every call."""
    wanted, result_wanted = annotations_of(function)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise DTypeError(str(error), op=function.__qualname__) from None
        sizes = check_call(function.__qualname__, bound.arguments, wanted, {})
        result = function(*args, **kwargs)
        if result_wanted is not None:
            result_wanted.check(function.__qualname__, "the result", result, sizes)
        return result

    return checked  # type: ignore[return-value]


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function; *args where Python cannot say."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]


VALUE = "value"  # in place of an axis: the argument is a number, and a Symbol itself


def dynamic_axes(
    name: str,
    names: Sequence[str],
    annotations: Mapping[str, Annotation],
    dynamic: Mapping[str, Any],
    symbols: Mapping[str, Any],
) -> dict[str, dict[Any, Any]]:
    """Symbolic axes by argument of the function `name`, from `dynamic=` and from annotations."""
    known = {n: s if isinstance(s, Expr) else symbol(n, *s) for n, s in symbols.items()}
    for annotation in annotations.values():  # Tensor[symbol("S", 1, 64)] bounds "S" too
        known |= {s.name: s for s in annotation.sizes if isinstance(s, Expr)}
    found: dict[str, dict[Any, Any]] = {}
    for argument, axes in dynamic.items():
        base = argument.split("[")[0].split(".")[0]
        if base not in names:
            raise UserError(
                "dynamic names no parameter",
                op=f"jit {name}",
                expected=f"some of {', '.join(names)}",
                got=argument,
            )
        axes = axes if isinstance(axes, Mapping) else {VALUE: axes}
        found[argument] = {
            a: s if isinstance(s, Expr) else known[s] if isinstance(s, str) else symbol(*s)
            for a, s in axes.items()
        }
        for size in found[argument].values():
            if isinstance(size, Expr) and size.terms != (((next(iter(atoms(size))),), 1),):
                raise UserError(
                    "a size is a Symbol, or one and a number",
                    op=f"jit {name}",
                    expected="N or N + 1",
                    got=size,
                )
    for argument, annotation in annotations.items():
        axes = annotation.symbolic_axes(known)
        if axes:
            found.setdefault(argument, {}).update(axes)
    return found
