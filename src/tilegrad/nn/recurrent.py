"""Recurrent layers: RNN, LSTM and GRU, each step of time one step of a `scan`.

Invariant: parameters have PyTorch's names, shapes and gate order (LSTM: in, forget, cell, out;
GRU: reset, update, new), one set per layer and direction.
"""

from __future__ import annotations

import math
from typing import Any

from ..core.errors import ShapeError, UserError
from ..graph import build
from ..ir.whole import wholes
from ..tensor.activation import relu
from ..tensor.control import scan
from ..tensor.creation import zeros
from ..tensor.maths import sigmoid, tanh
from ..tensor.matmul import linear
from ..tensor.movement import cat, stack
from ..tensor.random import dropout
from ..tensor.tensor import Tensor, lift
from . import init
from .linear import new_parameter
from .module import Module

State = tuple[Tensor, ...]


class _Recurrent(Module):
    """Layers and directions around one cell; `gates` is how many rows of weights a unit has."""

    gates = 1
    states = 1  # Tensors carried from step to step

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        sizes = (input_size, hidden_size, num_layers)
        input_size, hidden_size, num_layers = wholes(sizes, type(self).__name__, "a size")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, dropout
        self.bidirectional = bidirectional
        bound = 1.0 / math.sqrt(hidden_size) if hidden_size else 0.0
        for layer in range(num_layers):
            below = input_size if layer == 0 else hidden_size * len(self._directions())
            for suffix in self._directions():
                for name, shape in self._shapes(below):
                    parameter = new_parameter(*shape, dtype=dtype)
                    init.uniform_(parameter, -bound, bound)
                    self.register_parameter(f"{name}_l{layer}{suffix}", parameter)

    def _directions(self) -> tuple[str, ...]:
        return ("", "_reverse") if self.bidirectional else ("",)

    def _shapes(self, below: int) -> list[tuple[str, tuple[int, ...]]]:
        rows = self.gates * self.hidden_size
        found: list[tuple[str, tuple[int, ...]]] = [
            ("weight_ih", (rows, below)),
            ("weight_hh", (rows, self.hidden_size)),
        ]
        return found + ([("bias_ih", (rows,)), ("bias_hh", (rows,))] if self.bias else [])

    def cell(self, given: Tensor, back: Tensor, state: State) -> State:
        """The next state from what the input and the last output give to the gates."""
        raise UserError("no cell", op=type(self).__name__)

    def forward(self, input: Any, hx: Any = None) -> tuple[Tensor, Any]:
        """(output, last state) of (time, batch, features), or batch first where set so."""
        x = lift(input)
        single = x.ndim == 2
        if x.ndim not in (2, 3) or x.shape[-1] != self.input_size:
            raise ShapeError(
                "the input does not fit",
                op=type(self).__name__,
                expected=f"(time, batch, {self.input_size})",
                got=build.show(x.shape),
            )
        x = x.unsqueeze(1) if single else x.transpose(0, 1) if self.batch_first else x
        state = self._first_state(x, hx, single)
        last: list[State] = []
        for layer in range(self.num_layers):
            outputs = []
            for way, suffix in enumerate(self._directions()):
                place = layer * len(self._directions()) + way
                begin = tuple(s[place] for s in state)
                end, output = self._run(x, begin, f"_l{layer}{suffix}", way == 1)
                last.append(end)
                outputs.append(output)
            x = outputs[0] if len(outputs) == 1 else cat(outputs, -1)
            if self.dropout and layer + 1 < self.num_layers:
                x = dropout(x, self.dropout, self.training)
        ends = [stack(list(parts)) for parts in zip(*last)]
        if single:
            x, ends = x.squeeze(1), [e.squeeze(1) for e in ends]
        elif self.batch_first:
            x = x.transpose(0, 1)
        return x, ends[0] if self.states == 1 else tuple(ends)

    def _first_state(self, x: Tensor, hx: Any, single: bool) -> list[Tensor]:
        if hx is None:
            count = self.num_layers * len(self._directions())
            return [zeros(count, x.shape[1], self.hidden_size, dtype=x.dtype)] * self.states
        given = [lift(h) for h in (hx if self.states > 1 else (hx,))]
        return [h.unsqueeze(1) for h in given] if single else given

    def _run(self, x: Tensor, state: State, suffix: str, reverse: bool) -> tuple[State, Tensor]:
        """One layer in one direction; the input's part of all gates is one product."""
        given = linear(
            x,
            getattr(self, "weight_ih" + suffix),
            getattr(self, "bias_ih" + suffix) if self.bias else None,
        )
        weight = getattr(self, "weight_hh" + suffix)
        bias = getattr(self, "bias_hh" + suffix) if self.bias else None

        def step(carry: State, row: Tensor) -> tuple[State, Tensor]:
            after = self.cell(row, linear(carry[0], weight, bias), carry)
            return after, after[0]

        end, outputs = scan(step, state, given, reverse=reverse)
        return end, outputs

    def extra_repr(self) -> str:
        """Sizes and what differs from the defaults."""
        text = f"{self.input_size}, {self.hidden_size}"
        for name, default in (
            ("num_layers", 1),
            ("bias", True),
            ("batch_first", False),
            ("dropout", 0.0),
            ("bidirectional", False),
        ):
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)}"
        return text


class RNN(_Recurrent):
    """h = tanh(W_ih x + W_hh h), or relu."""

    def __init__(self, *args: Any, nonlinearity: str = "tanh", **kwargs: Any) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise UserError(
                "unknown nonlinearity",
                op="RNN",
                expected="'tanh' or 'relu'",
                got=repr(nonlinearity),
            )
        super().__init__(*args, **kwargs)
        self.nonlinearity = nonlinearity

    def cell(self, given: Tensor, back: Tensor, state: State) -> State:
        """One step."""
        return ((tanh if self.nonlinearity == "tanh" else relu)(given + back),)


class LSTM(_Recurrent):
    """Long short-term memory: a cell kept by gates."""

    gates, states = 4, 2

    def cell(self, given: Tensor, back: Tensor, state: State) -> State:
        """One step."""
        enter, forget, fresh, leave = (given + back).chunk(4, -1)
        cell = sigmoid(forget) * state[1] + sigmoid(enter) * tanh(fresh)
        return sigmoid(leave) * tanh(cell), cell


class GRU(_Recurrent):
    """Gated recurrent unit."""

    gates = 3

    def cell(self, given: Tensor, back: Tensor, state: State) -> State:
        """One step."""
        (reset, update, fresh), (back_reset, back_update, back_fresh) = (
            given.chunk(3, -1),
            back.chunk(3, -1),
        )
        keep = sigmoid(update + back_update)
        new = tanh(fresh + sigmoid(reset + back_reset) * back_fresh)
        return ((1.0 - keep) * new + keep * state[0],)


class _Cell(Module):
    """One step of a recurrent layer, with weights of its own."""

    layer: type[_Recurrent]
    weight_ih: Tensor
    weight_hh: Tensor

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        inner = self.layer(input_size, hidden_size, bias=bias, dtype=dtype, **options)
        object.__setattr__(self, "_step", inner.cell)  # the arithmetic alone: no part of the state
        for name, _ in inner._shapes(input_size):
            self.register_parameter(name, getattr(inner, f"{name}_l0"))
        if not bias:
            self.register_parameter("bias_ih", None)
            self.register_parameter("bias_hh", None)

    def forward(self, input: Any, hx: Any = None) -> Any:
        """The next state, (batch, hidden) or (hidden,); an LSTM's is (h, c)."""
        x = lift(input)
        if x.ndim not in (1, 2) or x.shape[-1] != self.input_size:
            raise ShapeError(
                "the input does not fit",
                op=type(self).__name__,
                expected=f"(batch, {self.input_size}) or ({self.input_size},)",
                got=build.show(x.shape),
            )
        states = self.layer.states
        if hx is None:
            state = (zeros(*x.shape[:-1], self.hidden_size, dtype=x.dtype),) * states
        else:
            state = tuple(lift(h) for h in (hx if states > 1 else (hx,)))
        given = linear(x, self.weight_ih, self.bias_ih)
        after: State = self._step(given, linear(state[0], self.weight_hh, self.bias_hh), state)
        return after if states > 1 else after[0]

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.input_size}, {self.hidden_size}" + ("" if self.bias else ", bias=False")


class RNNCell(_Cell):
    """One step of RNN."""

    layer = RNN


class LSTMCell(_Cell):
    """One step of LSTM."""

    layer = LSTM


class GRUCell(_Cell):
    """One step of GRU."""

    layer = GRU


__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell"]
