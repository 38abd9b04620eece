"""Optimizers: SGD, Adam and AdamW, as Tensor expressions that one jitted step fuses.

State (moments, the count of steps, learning rates) is Tensors, listed by `tensors()`, so a
jitted training step that is given the optimizer compiles once and changes them in place. A rate
is a number or a function of the step (see `rate`). Invariant: the numbers follow PyTorch's;
parameters of low precision are updated in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..core import dtype as dtypes
from ..core.errors import DTypeError, ShapeError, StateError, UserError
from ..tensor.creation import zeros
from ..tensor.elementwise import maximum
from ..tensor.maths import cast, expm1, pick, sqrt
from ..tensor.tensor import Tensor, lift, mode, no_grad, own_node, realize, wrap

Rate = Callable[[Tensor], Tensor]
Moments = dict[str, Tensor]


class Group(dict[str, Any]):
    """Parameters with their own settings; setting "lr" changes the rate without a new trace."""

    def __setitem__(self, key: str, value: Any) -> None:
        known = self.get(key)
        if key == "lr" and isinstance(known, Tensor) and not callable(value):
            known.assign(lift(float(value)))
        else:
            super().__setitem__(key, _rate(value) if key == "lr" else value)

    def rate(self, step: Tensor) -> Tensor:
        """The learning rate at a step, counted from 0."""
        found = self["lr"]
        return found if isinstance(found, Tensor) else lift(found(step))

    def set_rate(self, value: Any) -> None:
        """Take a number or a function of the step as the rate."""
        super().__setitem__("lr", _rate(value))


def _rate(value: Any) -> Any:
    if callable(value) and not isinstance(value, Tensor):
        return value
    number = float(value)
    if not number >= 0.0:
        raise UserError("bad learning rate", op="Optimizer", expected="lr >= 0", got=number)
    return wrap(own_node(lift(number).node))


class Optimizer:
    """Base: groups of parameters, their state, and `step`."""

    moments: tuple[str, ...] = ()  # names of the Tensors kept for each parameter

    def __init__(self, params: Any, defaults: Mapping[str, Any]) -> None:
        self.defaults = dict(defaults)
        self.param_groups: list[Group] = []
        self.state: dict[int, Moments] = {}  # by id of the parameter
        self.count = wrap(own_node(zeros(dtype=dtypes.float32).node))
        if isinstance(params, Tensor) or not isinstance(params, Iterable):
            raise DTypeError(
                "needs several Parameters",
                op=type(self).__name__,
                expected="a list of float Tensors, or of dicts with 'params'",
                got=_named(params) if isinstance(params, Tensor) else type(params).__name__,
                hint="give model.parameters()" if hasattr(params, "parameters") else "[parameter]",
            )
        given = list(params)
        if not given:
            raise UserError(
                "no parameters",
                op=type(self).__name__,
                expected="Parameters, or dicts with 'params'",
            )
        for group in given if isinstance(given[0], Mapping) else [{"params": given}]:
            self.add_param_group(group)

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Train more parameters, with settings of their own."""
        params = param_group["params"]
        found = [params] if isinstance(params, Tensor) else _unnamed(params)
        group = Group()
        for key, value in {**self.defaults, **param_group, "params": found}.items():
            group[key] = value
        for parameter in found:
            if not isinstance(parameter, Tensor) or not parameter.dtype.is_float:
                raise DTypeError(
                    "not a trainable Tensor",
                    op=type(self).__name__,
                    expected="float Tensors",
                    got=_named(parameter),
                    hint="give model.parameters()" if hasattr(parameter, "parameters") else None,
                )
            if not (parameter.is_leaf or mode.depth or mode.trace is not None):
                raise StateError(
                    "a Tensor that was computed gets no gradient",
                    op=type(self).__name__,
                    expected="leaves: Parameters, or Tensors made with requires_grad=True",
                    got=_named(parameter),
                    hint="compute it first, then set requires_grad = True on x.detach()",
                )
            if id(parameter) in self.state:
                raise UserError(
                    "a parameter is given twice",
                    op=type(self).__name__,
                    got=_named(parameter),
                    expected="each once",
                )
            self.state[id(parameter)] = self._fresh(parameter, group)
        self.param_groups.append(group)

    def _fresh(self, parameter: Tensor, group: Group) -> Moments:
        wide = dtypes.float32 if parameter.dtype.bits < 32 else parameter.dtype
        return {
            name: wrap(own_node(zeros(*parameter.shape, dtype=wide).node))
            for name in self._kept(group)
        }

    def _kept(self, group: Group) -> tuple[str, ...]:
        """Names of the moments this group needs."""
        return self.moments

    # ---- stepping -------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Change the parameters by their gradients; those without one stay."""
        loss = None if closure is None else closure()
        with no_grad():
            step = self.count.detach()
            changed: list[Tensor] = [self.count]
            for group in self.param_groups:
                rate = group.rate(step)
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        changed += self._change(parameter, group, rate, step)
            self.count.assign(step + 1.0)
        if mode.trace is None and not mode.depth:
            realize(changed)  # else the next step would stand on this one's Graph
        return loss

    def _change(self, parameter: Tensor, group: Group, rate: Tensor, step: Tensor) -> list[Tensor]:
        """One parameter and its moments at their next values; returns them."""
        state = self.state[id(parameter)]
        wide = dtypes.float32 if parameter.dtype.bits < 32 else parameter.dtype
        gradient = cast(parameter.grad.detach(), wide)  # type: ignore[union-attr]
        if group["maximize"]:
            gradient = -gradient
        value = cast(parameter.detach(), wide)
        before = {name: tensor.detach() for name, tensor in state.items()}
        after, moments = self.update(
            value, gradient, before, group, cast(rate, wide), cast(step, wide)
        )
        for name, moment in moments.items():
            state[name].assign(moment)
        parameter.assign(cast(after, parameter.dtype))
        return [parameter, *state.values()]

    def update(
        self,
        value: Tensor,
        gradient: Tensor,
        state: Moments,
        group: Group,
        rate: Tensor,
        step: Tensor,
    ) -> tuple[Tensor, Moments]:
        """The next value and moments of one parameter: what a subclass says."""
        raise UserError("no update", op=type(self).__name__, expected="a method update")

    # ---- state ----------------------------------------------------------------------------

    def parameters(self) -> Iterable[Tensor]:
        """All parameters, group by group."""
        return (p for group in self.param_groups for p in group["params"])

    @property
    def lr(self) -> Any:
        """The learning rate of the first group: a Tensor, or a function of the step."""
        return self.param_groups[0]["lr"]

    @lr.setter
    def lr(self, value: Any) -> None:
        for group in self.param_groups:
            group["lr"] = value

    def tensors(self) -> dict[str, Tensor]:
        """Everything a step reads and changes, by name, for `jit`."""
        found = {"step": self.count}
        for i, group in enumerate(self.param_groups):
            if isinstance(group["lr"], Tensor):
                found[f"lr.{i}"] = group["lr"]
        for i, parameter in enumerate(self.parameters()):
            found[f"params.{i}"] = parameter
            for name, moment in self.state[id(parameter)].items():
                found[f"{name}.{i}"] = moment
        return found

    def settings(self) -> tuple[Any, ...]:
        """What a trace depends on besides Tensors: the settings of the groups."""
        return tuple(
            [
                tuple([v for k, v in group.items() if k != "params" and not isinstance(v, Tensor)])
                for group in self.param_groups
            ]
        )

    def state_dict(self) -> dict[str, Any]:
        """State and settings, arranged as PyTorch does: parameters by number."""
        numbers = {id(p): i for i, p in enumerate(self.parameters())}
        state = {
            i: {"step": self.count.detach(), **{n: t.detach() for n, t in self.state[key].items()}}
            for key, i in numbers.items()
        }
        groups = []
        for group in self.param_groups:
            entry = {k: v for k, v in group.items() if k not in ("params", "lr")}
            rate = group["lr"]
            entry["lr"] = float(rate) if isinstance(rate, Tensor) else rate
            entry["params"] = [numbers[id(p)] for p in group["params"]]
            groups.append(entry)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take state and settings; also those of PyTorch's optimizer of the same kind."""
        groups, parameters = state_dict["param_groups"], list(self.parameters())
        sizes = [len(g["params"]) for g in groups]
        if sizes != [len(g["params"]) for g in self.param_groups]:
            raise ShapeError(
                "the groups do not fit",
                op=f"{type(self).__name__}.load_state_dict",
                expected=[len(g["params"]) for g in self.param_groups],
                got=sizes,
            )
        for group, given in zip(self.param_groups, groups):
            for key, value in given.items():
                if key != "params" and (key in group or key == "lr"):
                    group[key] = value
        order = [n for g in groups for n in g["params"]]
        with no_grad():
            for number, parameter in zip(order, parameters):
                self._load(parameter, state_dict["state"].get(number, {}))

    def _load(self, parameter: Tensor, given: Mapping[str, Any]) -> None:
        for name, moment in self.state[id(parameter)].items():
            if given.get(name) is not None:
                found = lift(given[name])
                if found.shape != moment.shape:
                    raise ShapeError(
                        "a moment does not fit",
                        op=f"{type(self).__name__}.{name}",
                        expected=moment.shape,
                        got=found.shape,
                    )
                moment.assign(found)
        if given.get("step") is not None:
            self.count.assign(lift(given["step"]))

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["state"] = [self.state[id(p)] for p in self.parameters()]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.state = {id(p): moments for p, moments in zip(self.parameters(), state["state"])}

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for i, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {i}")
            for key, value in sorted(group.items()):
                if key != "params":
                    shown = float(value) if isinstance(value, Tensor) else value
                    lines.append(f"    {key}: {shown}")
        return "\n".join([*lines, ")"])


def _unnamed(params: Iterable[Any]) -> list[Any]:
    """Parameters, also from (name, parameter) pairs."""
    return [p[1] if isinstance(p, tuple) and len(p) == 2 else p for p in params]


def _named(value: Any) -> str:
    return f"Tensor {value.node.type}" if isinstance(value, Tensor) else type(value).__name__


def checked(op: str, **ranges: tuple[float, float, float]) -> None:
    """Refuse settings outside of [low, high)."""
    for name, (value, low, high) in ranges.items():
        if not low <= value < high:
            raise UserError(f"bad {name}", op=op, expected=f"{low} <= {name} < {high}", got=value)


class SGD(Optimizer):
    """Gradient descent, with momentum if asked for."""

    def __init__(
        self,
        params: Any,
        lr: float | Rate = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        checked(
            "SGD", momentum=(momentum, 0.0, math.inf), weight_decay=(weight_decay, 0.0, math.inf)
        )
        if nesterov and (momentum <= 0 or dampening != 0):
            raise UserError(
                "nesterov needs momentum and no dampening",
                op="SGD",
                expected="momentum > 0, dampening = 0",
                got=f"momentum {momentum}, dampening {dampening}",
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
            },
        )

    def _kept(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(
        self,
        value: Tensor,
        gradient: Tensor,
        state: Moments,
        group: Group,
        rate: Tensor,
        step: Tensor,
    ) -> tuple[Tensor, Moments]:
        """value - rate * (gradient + weight_decay * value), smoothed by the momentum."""
        if group["weight_decay"]:
            gradient = gradient + value * group["weight_decay"]
        momentum = group["momentum"]
        if not momentum:
            return value - gradient * rate, {}
        speed = state["momentum_buffer"] * momentum + gradient * (1.0 - group["dampening"])
        if group["dampening"]:
            speed = pick(step == 0.0, gradient, speed)
        ahead = gradient + speed * momentum if group["nesterov"] else speed
        return value - ahead * rate, {"momentum_buffer": speed}


class Adam(Optimizer):
    """Steps scaled by running moments of the gradient; weight decay is part of the gradient."""

    moments = ("exp_avg", "exp_avg_sq")
    decoupled = False
    default_decay = 0.0

    def __init__(
        self,
        params: Any,
        lr: float | Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        decay = self.default_decay if weight_decay is None else weight_decay
        checked(
            type(self).__name__,
            beta1=(betas[0], 0.0, 1.0),
            beta2=(betas[1], 0.0, 1.0),
            eps=(eps, 0.0, math.inf),
            weight_decay=(decay, 0.0, math.inf),
        )
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": tuple(betas),
                "eps": eps,
                "weight_decay": decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
            },
        )

    def _kept(self, group: Group) -> tuple[str, ...]:
        return (*self.moments, "max_exp_avg_sq") if group["amsgrad"] else self.moments

    def update(
        self,
        value: Tensor,
        gradient: Tensor,
        state: Moments,
        group: Group,
        rate: Tensor,
        step: Tensor,
    ) -> tuple[Tensor, Moments]:
        """value - rate * mean / (sqrt(mean square) + eps), both freed of their bias."""
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        if decay:
            if self.decoupled:
                value = value * (1.0 - rate * decay)
            else:
                gradient = gradient + value * decay
        mean = state["exp_avg"] + (gradient - state["exp_avg"]) * (1.0 - beta1)
        square = state["exp_avg_sq"] * beta2 + gradient * gradient * (1.0 - beta2)
        after = {"exp_avg": mean, "exp_avg_sq": square}
        largest = square
        if group["amsgrad"]:
            largest = after["max_exp_avg_sq"] = maximum(state["max_exp_avg_sq"], square)
        scale = sqrt(_unbiased(beta2, step))
        size = rate / _unbiased(beta1, step)
        return value - mean / (sqrt(largest) / scale + group["eps"]) * size, after


def _unbiased(beta: float, step: Tensor) -> Tensor:
    """1 - beta ** (step + 1), exact also where beta is near 1."""
    return -expm1((step + 1.0) * math.log(beta)) if beta else lift(1.0)


class AdamW(Adam):
    """Adam with weight decay apart from the gradient."""

    decoupled = True
    default_decay = 1e-2


__all__ = ["SGD", "Adam", "AdamW", "Group", "Optimizer"]
