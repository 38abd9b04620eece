"""Transformer layers as PyTorch has them: encoder, decoder, and both together.

Invariant: parameters have PyTorch's names; a norm stands before or after each part, as said.
"""

from __future__ import annotations

from typing import Any

from ..core.errors import UserError
from ..tensor import activation
from ..tensor.creation import full
from ..tensor.tensor import Tensor, lift
from . import init
from .attention import MultiheadAttention
from .containers import ModuleList
from .linear import Dropout, Linear
from .module import Module
from .normalization import LayerNorm


class TransformerEncoderLayer(Module):
    """Self-attention and two linear layers, each with a residual and a norm."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Any = activation.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.self_attn = MultiheadAttention(
            d_model, nhead, dropout, bias, batch_first=batch_first, dtype=dtype
        )
        self.linear1 = Linear(d_model, dim_feedforward, bias, dtype)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias, dtype)
        self.norm_first = norm_first
        self.norm1 = LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype)
        self.norm2 = LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype)
        self.dropout1, self.dropout2 = Dropout(dropout), Dropout(dropout)
        self.activation = _activation(activation)

    def forward(
        self, x: Any, mask: Any = None, key_padding_mask: Any = None, is_causal: bool = False
    ) -> Tensor:
        """The tokens after one layer."""
        x = lift(x)
        masks = (mask, key_padding_mask, is_causal)
        if self.norm_first:
            x = x + self._attend(self.norm1(x), *masks)
            return x + self._feed(self.norm2(x))
        x = self.norm1(x + self._attend(x, *masks))
        return self.norm2(x + self._feed(x))

    def _attend(self, x: Tensor, mask: Any, padding: Any, is_causal: bool) -> Tensor:
        found = self.self_attn(x, x, x, padding, False, mask, is_causal=is_causal)[0]
        return self.dropout1(found)

    def _feed(self, x: Tensor) -> Tensor:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))


def _activation(given: Any) -> Any:
    if isinstance(given, str):
        if given not in ("relu", "gelu"):
            raise UserError(
                "unknown activation",
                op="TransformerEncoderLayer",
                expected="'relu', 'gelu' or a function",
                got=repr(given),
            )
        return getattr(activation, given)
    return given


class TransformerEncoder(Module):
    """Copies of a layer, one after the other."""

    def __init__(self, encoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__()
        from copy import deepcopy

        self.layers = ModuleList(deepcopy(encoder_layer) for _ in range(num_layers))
        self.num_layers = num_layers
        self.norm = norm

    def forward(
        self, x: Any, mask: Any = None, key_padding_mask: Any = None, is_causal: bool = False
    ) -> Tensor:
        """The tokens after all layers."""
        for layer in self.layers:
            x = layer(x, mask, key_padding_mask, is_causal)
        return x if self.norm is None else self.norm(x)


class TransformerDecoderLayer(Module):
    """Self-attention, attention to another sequence and two linear layers, each with a residual
    and a norm."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Any = activation.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        for name in ("self_attn", "multihead_attn"):
            setattr(
                self,
                name,
                MultiheadAttention(
                    d_model, nhead, dropout, bias, batch_first=batch_first, dtype=dtype
                ),
            )
        self.linear1 = Linear(d_model, dim_feedforward, bias, dtype)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias, dtype)
        self.norm_first = norm_first
        for number in (1, 2, 3):
            setattr(
                self, f"norm{number}", LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype)
            )
            setattr(self, f"dropout{number}", Dropout(dropout))
        self.activation = _activation(activation)

    def forward(
        self,
        tgt: Any,
        memory: Any,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """The tokens after one layer."""
        x, other = lift(tgt), lift(memory)
        own = (tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        across = (memory_mask, memory_key_padding_mask, memory_is_causal)
        if self.norm_first:
            x = x + self._own(self.norm1(x), *own)
            x = x + self._across(self.norm2(x), other, *across)
            return x + self._feed(self.norm3(x))
        x = self.norm1(x + self._own(x, *own))
        x = self.norm2(x + self._across(x, other, *across))
        return self.norm3(x + self._feed(x))

    def _own(self, x: Tensor, mask: Any, padding: Any, causal: bool) -> Tensor:
        found = self.self_attn(x, x, x, padding, False, mask, is_causal=causal)[0]
        return self.dropout1(found)

    def _across(self, x: Tensor, other: Tensor, mask: Any, padding: Any, causal: bool) -> Tensor:
        found = self.multihead_attn(x, other, other, padding, False, mask, is_causal=causal)[0]
        return self.dropout2(found)

    def _feed(self, x: Tensor) -> Tensor:
        return self.dropout3(self.linear2(self.dropout(self.activation(self.linear1(x)))))


class TransformerDecoder(Module):
    """Copies of a decoder layer, one after the other."""

    def __init__(self, decoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__()
        from copy import deepcopy

        self.layers = ModuleList(deepcopy(decoder_layer) for _ in range(num_layers))
        self.num_layers = num_layers
        self.norm = norm

    def forward(self, tgt: Any, memory: Any, *masks: Any, **more: Any) -> Tensor:
        """The tokens after all layers; masks as of one layer."""
        x = tgt
        for layer in self.layers:
            x = layer(x, memory, *masks, **more)
        return x if self.norm is None else self.norm(x)


class Transformer(Module):
    """An encoder and a decoder."""

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Any = activation.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        options = (
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            dtype,
        )

        def last() -> LayerNorm:
            return LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype)

        self.encoder = TransformerEncoder(
            TransformerEncoderLayer(*options), num_encoder_layers, last()
        )
        self.decoder = TransformerDecoder(
            TransformerDecoderLayer(*options), num_decoder_layers, last()
        )
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first
        for parameter in self.parameters():
            if parameter.ndim > 1:
                init.xavier_uniform_(parameter)

    def forward(
        self,
        src: Any,
        tgt: Any,
        src_mask: Any = None,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        src_key_padding_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
    ) -> Tensor:
        """The target's tokens after both stacks."""
        memory = self.encoder(src, src_mask, src_key_padding_mask)
        return self.decoder(
            tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        )

    @staticmethod
    def generate_square_subsequent_mask(sz: int) -> Tensor:
        """-inf above the diagonal, 0 elsewhere."""
        return full((sz, sz), float("-inf")).triu(1)


__all__ = [
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]
