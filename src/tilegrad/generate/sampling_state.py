"""What the device keeps of how each request samples: limits, seeds, counts, allowed tokens.

A *slot* is a request's row. The host writes a row when a request comes (a small copy) and a step
reads rows by slot, counts what it draws, and never asks the host. One int32 counts a token for a
slot: how often it was produced, plus PROMPT if the prompt has it.
Invariant: counts are written in place; what would copy them is an error.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from math import inf
from typing import Any

import numpy as np

from ..core.dtype import float32, int32, uint32
from ..core.errors import UserError
from ..tensor.creation import zeros_of_own
from ..tensor.placement import default_device, use
from ..tensor.tensor import Tensor
from .ledger import Ledger, write
from .sampling_limits import MOST_BIASED, Sampling

PROMPT = 1 << 30  # in a count: the prompt has the token
FLOATS = ("sharpness", "top_p", "min_p", "repetition", "presence", "frequency")
GREEDY = 1e30  # 1 / temperature where it is 0: all but the largest become 0


class SamplingState:
    """Rows of sampling for `requests` slots over a vocabulary; an argument of a jitted step."""

    floats: Tensor
    top_k: Tensor
    seeds: Tensor
    biases: Tensor
    held: Tensor
    until: Tensor
    never_copied = ("counts",)  # jit writes these in place, or it is an error

    def __init__(self, requests: int, vocabulary: int, device: Any = None) -> None:
        if requests < 1 or not 1 <= vocabulary <= 1 << 24:
            raise UserError(
                "no such sizes",
                op="SamplingState",
                got=(requests, vocabulary),
                expected="requests >= 1 and 1 <= vocabulary <= 2**24",
            )
        where = default_device() if device is None else use(device, "SamplingState")
        self.requests, self.vocabulary = requests, vocabulary
        one = ((requests,), int32)
        self._rows = Ledger(
            {
                "floats": ((requests, len(FLOATS)), float32),
                "top_k": one,  # 0: all; below: nothing is drawn
                "seeds": ((requests, 2), uint32),
                "biases": one,  # how many tokens are biased
                "held": one,  # so many more, before position `until`
                "until": one,
            },
            where,
        )
        for name in self._rows.host:
            setattr(self, name, self._rows.tensor(name))
        self.counts = zeros_of_own((requests, vocabulary), int32, where, "sampling")
        self.bias_ids = zeros_of_own((requests, MOST_BIASED), int32, where, "sampling")
        self.bias = zeros_of_own((requests, MOST_BIASED), float32, where, "sampling")
        words = -(-vocabulary // 32)  # of a bit for each token
        self.allowed = zeros_of_own((requests, words), int32, where, "sampling")
        for slot in range(requests):
            self.clear_row(slot, send=False)
            self.allow(slot, None)
        self.send()

    def __repr__(self) -> str:
        return f"<sampling of {self.requests} requests over {self.vocabulary} tokens>"

    def tensors(self) -> dict[str, Tensor]:
        """All of its state by name, for `jit`."""
        limits, biased = ("floats", "top_k", "seeds", "counts"), ("biases", "held", "until")
        names = (*limits, *biased, "bias_ids", "bias", "allowed")
        return {name: getattr(self, name) for name in names}

    def set_row(
        self,
        slot: int,
        sampling: Sampling,
        prompt_tokens: Sequence[int] = (),
        output_tokens: Sequence[int] = (),
        held_back: Collection[int] = (),
        until: int = 0,
        send: bool = True,
    ) -> None:
        """Give a slot to a request, which may have produced tokens before.

        Tokens that are `held_back` are not picked before the position `until`. Rows that are not
        sent at once go with the next `send`.
        """
        self._check(slot, sampling)
        greedy = sampling.greedy
        sharpness = GREEDY if greedy else 1.0 / sampling.temperature
        floats = [
            sharpness,
            1.0 if greedy else sampling.top_p,
            0.0 if greedy else sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        ]
        bias = sampling.logit_bias or {}
        top_k = 1 if greedy else max(0, sampling.top_k)
        values = (floats, top_k, _words(sampling.seed), len(bias), len(held_back), until)
        for array, value in zip(self._rows.host.values(), values):
            array[slot] = value
        if sampling.penalised:
            write(self.counts, slot, self._counted(prompt_tokens, output_tokens)[None])
        if bias or held_back:
            ids, added = np.zeros((2, 1, MOST_BIASED))
            count = len(bias) + len(held_back)
            ids[0, :count] = [*bias, *held_back]
            added[0, :count] = [*bias.values(), *[-inf] * len(held_back)]
            write(self.bias_ids, slot, ids)
            write(self.bias, slot, added)
        if send:
            self.send()

    def send(self) -> None:
        """Tell the device of rows that were set: one copy."""
        self._rows.send()

    def clear_row(self, slot: int, send: bool = True) -> None:
        """Take a slot from its request: it becomes greedy."""
        self._check(slot, None)
        rows = self._rows.host
        rows["floats"][slot] = [GREEDY, 1.0, 0.0, 1.0, 0.0, 0.0]
        rows["top_k"][slot] = 1
        rows["biases"][slot] = rows["held"][slot] = 0
        if send:
            self.send()

    def close_row(self, slot: int) -> None:
        """Draw nothing for a slot that no request will have: its rows pad, and are not read."""
        self.clear_row(slot, send=False)
        self._rows.host["top_k"][slot] = -1
        self.send()

    def allow(self, slot: int, words: np.ndarray[Any, Any] | None) -> None:
        """Say which tokens a slot may get: bit t % 32 of word t // 32; None: all of them."""
        self._check(slot, None)
        size = self.allowed.shape[1]
        if words is not None and (words.dtype != np.int32 or words.shape != (size,)):
            raise UserError(
                "the words of allowed tokens do not fit",
                op="allow",
                expected=f"int32[{size}]",
                got=f"{words.dtype}{list(words.shape)}",
            )
        write(self.allowed, slot, np.full((1, size), -1) if words is None else words[None])

    def _check(self, slot: int, sampling: Sampling | None) -> None:
        if not 0 <= slot < self.requests:
            raise UserError(
                "no such slot", op="set_row", expected=f"0 <= slot < {self.requests}", got=slot
            )
        for token in (sampling and sampling.logit_bias) or ():
            if token >= self.vocabulary:
                raise UserError(
                    "logit_bias names a token that is not in the vocabulary",
                    op="set_row",
                    expected=f"below {self.vocabulary}",
                    got=token,
                )

    def _counted(self, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray[Any, Any]:
        size = self.vocabulary
        for tokens in (prompt, output):
            if len(tokens) and not 0 <= min(tokens) <= max(tokens) < size:
                raise UserError(
                    "a token is not in the vocabulary",
                    op="set_row",
                    expected=f"0 <= token < {size}",
                    got=(min(tokens), max(tokens)),
                )
        counts = np.bincount(np.asarray(output, np.int64), minlength=size).astype(np.int32)
        counts[np.asarray(prompt, np.int64)] += np.int32(PROMPT)
        return counts


def _words(seed: int | None) -> np.ndarray[Any, Any]:
    """The two words of a seed, or of one of the system's."""
    found = int.from_bytes(os.urandom(8), "little") if seed is None else seed % (1 << 64)
    return np.array([found % (1 << 32), found >> 32], np.uint32)


__all__ = ["FLOATS", "PROMPT", "SamplingState"]
