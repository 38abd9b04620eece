"""Networks people compare chips with, as Workloads traced from our own modules.

Invariant: shapes are those of the published networks; weights are never made, for nothing is
computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import nn
from ..core import dtype as dtypes
from ..core.errors import UserError
from ..models import Decoder, DecoderConfig
from ..models.resnet import resnet
from ..nn.functional import attention
from ..tensor.creation import zeros
from ..tensor.movement import cat
from ..tensor.tensor import Tensor
from .workload import Workload, workload

LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LLAMA_3_70B = {
    **LLAMA_3_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
SMOLLM2_135M = {
    **LLAMA_3_8B,
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
DECODERS = {
    "llama-3-8b": LLAMA_3_8B,
    "llama-3-70b": LLAMA_3_70B,
    "smollm2-135m": SMOLLM2_135M,
}


def resnet_50(batch: int = 1) -> Workload:
    """ResNet-50 on images of 224 x 224: 53 convolutions and a linear layer."""
    pictures = zeros((batch, 3, 224, 224))
    return _traced(resnet(50, bias=False), pictures, "resnet-50")


def mobilenet_v1(batch: int = 1) -> Workload:
    """MobileNet on images of 224 x 224: depthwise 3 x 3 and pointwise 1 x 1 convolutions."""
    steps = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)]
    steps += [(512, 1)] * 5 + [(1024, 2), (1024, 1)]
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False)]
    inputs = 32
    for outputs, stride in steps:
        layers.append(nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False))
        layers.append(nn.Conv2d(inputs, outputs, 1, bias=False))
        inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000)]
    return _traced(nn.Sequential(*layers), zeros((batch, 3, 224, 224)), "mobilenet-v1")


def bert_base(batch: int = 1, tokens: int = 384) -> Workload:
    """BERT-base: 12 layers of width 768."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 12)
    return _traced(model, zeros((batch, tokens, 768)), "bert-base")


def decoder(
    name: str, batch: int = 1, tokens: int = 1024, context: int = 0, every: bool = False
) -> Workload:
    """A step of a language model: `tokens` new ones of each request after `context` known ones.

    Prefill has no context; decoding one token a request. Logits are of the last token alone, or
    of `every` one, as in training. After a context every new token sees all keys.
    """
    if name not in DECODERS:
        raise UserError("unknown model", op="chip", expected=", ".join(DECODERS), got=name)
    config = DecoderConfig.from_huggingface(DECODERS[name])
    if tokens + context > config.context:
        raise UserError(
            "too many tokens",
            op="chip",
            expected=f"tokens + context of at most {config.context}",
            got=f"{tokens} + {context}",
            hint=f"context = {max(config.context - tokens, 0)} would fit",
        )
    model = Decoder(config, dtypes.bfloat16)
    shape = (batch, context, config.key_heads, config.head_width)
    cache = [zeros(shape, dtype=dtypes.bfloat16) for _ in range(2 * config.layers)]

    def step(rows: Tensor, positions: Tensor, *known: Tensor) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = k, v
            if context:
                keys = cat([known[2 * layer], k], 1)
                values = cat([known[2 * layer + 1], v], 1)
            how = config.attention(layer)
            return attention(q, keys, values, causal=not context, layout="bthd", **how)

        hidden = model.hidden(rows, positions, attend)
        return model.logits(hidden if every else hidden[:, -1])

    rows = zeros((batch, tokens), dtype=dtypes.int32)
    positions = zeros((tokens,), dtype=dtypes.int32)
    return workload(step, rows, positions, *cache, name=name)


def _traced(model: nn.Module, x: Tensor, name: str) -> Workload:
    model.eval()
    return workload(lambda given: model(given), x, name=name)


NETWORKS: dict[str, Callable[..., Workload]] = {
    "resnet-50": resnet_50,
    "mobilenet-v1": mobilenet_v1,
    "bert-base": bert_base,
}


def network(name: str, **sizes: Any) -> Workload:
    """A network by name: a picture or text network, or a language model."""
    if name in NETWORKS:
        return NETWORKS[name](**sizes)
    if name in DECODERS:
        return decoder(name, **sizes)
    raise UserError(
        "unknown model", op="chip", expected=", ".join([*NETWORKS, *DECODERS]), got=repr(name)
    )


__all__ = ["DECODERS", "NETWORKS", "bert_base", "decoder", "mobilenet_v1", "network", "resnet_50"]
