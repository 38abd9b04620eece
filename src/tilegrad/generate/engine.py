"""The engine: requests in, tokens out, several requests in one step.

Requests wait in the order they came until a slot is free and pages for all they can ever need
are; then their prompts go through the model in chunks, together with the next tokens of those
that decode already. On a GPU a decode step is begun before the ids of the one before are read, as
long as the requests stay the same: what it needs is on the device.
Invariant: a request's tokens do not depend on its neighbours, nor on whether they fail; its slot
and its pages are free again as soon as it is finished, cancelled or failed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from .. import nn
from ..core.config import config as settings
from ..core.config import override
from ..core.dtype import DType, bfloat16, dtype_of
from ..core.errors import UserError
from ..models.decoder.model import Decoder
from ..runtime.buffer import HOST
from ..runtime.limits import limits_of
from ..tensor.placement import default_device, use
from .grammar import Grammars, Matcher
from .pages import PagePool
from .request import Produced, Request
from .sampling import NO_TOKEN, Sampling, Variant
from .sampling_state import write
from .steps import Found, Launched, Part, Steps, Tell

SCORING = object()  # owns the pages of tokens that are scored


@dataclass(slots=True)
class Running:
    """A request that has a slot: how much of its prompt is in, how many tokens it made."""

    request: Request
    slot: int
    fed: int = 0
    made: int = 0

    @property
    def left(self) -> int:
        """Tokens of the prompt that are not in yet."""
        return len(self.request.tokens) - self.fed


@dataclass(slots=True)
class Group:
    """The requests of one step after the other, while they stay the same."""

    runs: list[Running]
    slots: list[int]
    variant: Variant
    decodes: bool  # all prompts are in

    @property
    def keys(self) -> int:
        """The most keys of a request in the next step, or in the one after it."""
        return max(run.fed + run.made for run in self.runs) + 1

    @staticmethod
    def of(runs: list[Running]) -> Group:
        """The Group of some requests."""
        return Group(
            runs,
            [run.slot for run in runs],
            reduce(Variant.joined, (run.request.variant for run in runs)),
            not any(run.left for run in runs),
        )


class Engine:
    """A decoder with a paged cache; `add` requests, then `step` while `busy`."""

    def __init__(
        self,
        model: Decoder,
        *,
        device: Any = None,
        requests: int = 8,
        context: int | None = None,
        page: int | None = None,
        pages: int | None = None,
        cache_dtype: Any = None,
        chunk: int | None = None,
        tell: Tell | None = None,
        words: int | None = None,
        grammars: Grammars | None = None,
        determinism: str | None = None,
    ) -> None:
        """`pages` is the size of the pool; all requests can have the whole context if None.
        `determinism` is the level that steps are compiled for, the Config's if None.

        `words` is how many ids the tokenizer has, if fewer than the model: no other is picked.
        Requests with a Constraint need `grammars`.
        """
        config = model.config
        device = default_device() if device is None else use(device, "Engine")
        self.model, self.config, self.requests = model, config, _positive("requests", requests)
        self.context = _positive("context", context or config.context)
        if self.context > config.context:
            raise UserError(
                "the context is longer than the model's",
                op="Engine",
                expected=f"at most {config.context}",
                got=self.context,
            )
        page = limits_of(device).page if page is None else _positive("page", page)
        most_pages = -(-self.context // page)
        count = most_pages * requests if pages is None else _positive("pages", pages)
        dtype = _cache_dtype(model, cache_dtype)
        self.chunk = max(requests, chunk or limits_of(device).chunk)
        self.pool = PagePool(count, page)
        self.cache = nn.PagedCache(
            config.layers,
            count,
            page,
            config.key_heads,
            config.head_width,
            requests=requests + 1,
            most_pages=most_pages,
            dtype=dtype,
            device=device,
        )
        self.steps = Steps(model, self.cache, self.chunk, tell or (lambda *_: None), words)
        self.determinism = determinism or settings().determinism
        self.waiting: dict[Hashable, Request] = {}  # in order
        self.running: dict[Hashable, Running] = {}
        self.slots = list(range(requests - 1, -1, -1))  # free; the last is taken first
        self.grammars = grammars
        self._matchers: dict[Hashable, Matcher] = {}  # of requests with a Constraint
        self._masked: set[int] = set()  # slots that may not get every token
        self._sampled: set[int] = set()  # slots whose sampling was set, and not cleared yet
        self._group: Group | None = None  # None: requests came or went
        self.overlaps = device != HOST  # the next step begins before the ids of one are read
        self._ahead: tuple[Group, Launched] | None = None  # what was begun

    def __repr__(self) -> str:
        return (
            f"<engine: {len(self.running)} of {self.requests} requests run, "
            f"{len(self.waiting)} wait, context {self.context}>"
        )

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self.waiting)

    # ---- requests ---------------------------------------------------------------------------

    def __contains__(self, id: Hashable) -> bool:
        return id in self.running or id in self.waiting

    def add(self, request: Request) -> None:
        """Queue a request; what can never be served is an error at once."""
        if request.id in self:
            raise UserError("two requests have one id", op="Engine.add", got=request.id)
        self._check(request.tokens, "a prompt")
        if request.sampling is not None and request.sampling.logit_bias:
            self._check(list(request.sampling.logit_bias), "logit_bias")
        if request.most > self.context:
            raise UserError(
                "the prompt and its answer are longer than the context",
                op="Engine.add",
                expected=f"at most {self.context} tokens",
                got=f"{len(request.tokens)} of the prompt and max_tokens={request.max_tokens}",
            )
        if not self.pool.can_ever_fit(request.most):
            raise UserError(
                "the cache can never hold this request",
                op="Engine.add",
                expected=f"at most {self.pool.pages * self.pool.page} tokens",
                got=request.most,
                hint="lower max_tokens, or give the engine more pages",
            )
        if request.constraint is not None:
            self._matchers[request.id] = self._matcher(request)
        self.waiting[request.id] = request

    def cancel(self, id: Hashable) -> bool:
        """Forget a request and free what it has; whether there was one."""
        if id in self.running:
            self._end(self.running[id])
            return True
        self._matchers.pop(id, None)
        return self.waiting.pop(id, None) is not None

    def _check(self, tokens: Sequence[int], what: str) -> None:
        wrong = [t for t in tokens if not 0 <= t < self.config.vocabulary]
        if wrong:
            raise UserError(
                f"{what} has tokens that are not in the vocabulary",
                op="Engine",
                expected=f"0 to {self.config.vocabulary - 1}",
                got=wrong[:5],
            )

    def _matcher(self, request: Request) -> Matcher:
        assert request.constraint is not None
        if self.grammars is None:
            raise UserError(
                "this engine has no words, so it cannot follow a constraint",
                op="Engine.add",
                expected="an Engine with `grammars`",
                got=request.constraint.kind,
            )
        matcher = self.grammars.matcher(request.constraint)
        if not matcher.ends <= request.stop_tokens:
            raise UserError(
                "a constrained request must end at the model's own end",
                op="Engine.add",
                expected=f"{sorted(matcher.ends)} in stop_tokens",
                got=sorted(request.stop_tokens),
            )
        return matcher

    def _comes(self) -> Request | None:
        """The first that waits, if there is room for it."""
        first = next(iter(self.waiting.values()), None)
        fits = first is not None and self.slots and self.pool.fits(first.most)
        return first if fits else None

    def _admit(self) -> list[Produced]:
        """Give slots and pages to those that wait, in order, while there are some.

        One that cannot begin ends in an error: what is given back.
        """
        failed = []
        while (request := self._comes()) is not None:
            self._group = None
            run = self.running[request.id] = Running(request, self.slots.pop())
            del self.waiting[request.id]
            try:
                self._seat(run.slot, request.id, request.most)
                self._set_sampling(run.slot, request)
            except Exception as error:  # of one request alone: no step has begun
                failed.append(self._fail(run, error))
        return failed

    def _set_sampling(self, slot: int, request: Request) -> None:
        """Tell the device how a request samples, or that it takes the likeliest token."""
        if request.variant != Variant():
            self._sampled.add(slot)
            self.steps.sampling().set_row(
                slot,
                request.sampling or Sampling(),
                request.tokens,
                held_back=request.held_back,
                until=len(request.tokens) + request.min_tokens,
            )
        elif slot in self._sampled:
            self.steps.sampling().clear_row(slot)
            self._sampled.discard(slot)
        if request.constraint is not None:
            self._masked.add(slot)
            self.steps.sampling().allow(slot, self._matchers[request.id].words())
        elif slot in self._masked:
            self.steps.sampling().allow(slot, None)
            self._masked.discard(slot)

    def _seat(self, slot: int, owner: Hashable, tokens: int) -> None:
        """Pages for a slot that begins anew."""
        row = np.zeros((1, self.cache.most_pages))
        taken = self.pool.take(owner, tokens)
        row[0, : len(taken)] = taken
        write(self.cache.table, slot, row)
        write(self.cache.lengths, slot, np.zeros(1))

    def _end(self, run: Running) -> None:
        """Take back what a request has; nothing here can fail."""
        del self.running[run.request.id]
        self._group = None
        self._matchers.pop(run.request.id, None)
        if not self.running:
            self._ahead = None
        if run.request.id in self.pool.owned:
            self.pool.give_back(run.request.id)
        self.slots.append(run.slot)

    def _fail(self, run: Running, error: Exception) -> Produced:
        self._end(run)
        return Produced(run.request.id, finished="error", error=error)

    # ---- steps ------------------------------------------------------------------------------

    def step(self) -> list[Produced]:
        """Run one step: a token for each request that decodes, a chunk of prompts beside them.

        A request that cannot begin, or whose logits are no numbers, ends in an error of its own.
        A step that fails, or is interrupted, ends the requests that run: nobody knows how far
        it came.
        """
        try:
            with override(determinism=self.determinism):
                failed = self._admit() if self._ahead is None else []
                runs, found = self._step()
        except BaseException:
            for run in list(self.running.values()):
                self._end(run)
            raise
        return failed + [
            self._made(run, found, row)
            for row, run in enumerate(runs)
            if not run.left and self.running.get(run.request.id) is run
        ]

    def _step(self) -> tuple[list[Running], Found]:
        """The requests of a step and what it gave for each."""
        if self._ahead is None:
            if not self.running:
                return [], Found(np.zeros(0, np.int32))
            group = self._group = self._group or Group.of(list(self.running.values()))
            if not group.decodes:
                self._group = None
                runs, parts = self._share(group.runs)
                return runs, self.steps.ragged(parts, group.variant)
            launched = self._launch(group)
        else:
            group, launched = self._ahead
        steady = self.overlaps and self._is_steady(group)
        self._ahead = (group, self._launch(group)) if steady else None
        return group.runs, launched.wait()

    def _launch(self, group: Group) -> Launched:
        return self.steps.launch(group.slots, group.variant, group.keys)

    def _is_steady(self, group: Group) -> bool:
        """Whether the step after the one under way has the same requests, as far as is known.

        One that stops meanwhile leaves a token in its own pages, which nobody reads.
        """
        return (
            self._group is group
            and not group.variant.masks  # what is allowed next depends on the token
            and self._comes() is None
            and all(run.made + 2 <= run.request.max_tokens for run in group.runs)
        )

    def _share(self, runs: list[Running]) -> tuple[list[Running], list[Part]]:
        """Who has what in a ragged step: the next token of those that decode, then prompts."""
        chosen = [run for run in runs if not run.left]
        parts = [Part(run.slot) for run in chosen]
        room = self.chunk - len(parts)
        for run in (run for run in runs if run.left):
            count = min(room, run.left)
            if not count:
                break
            tokens = run.request.tokens[run.fed : run.fed + count]
            run.fed, room = run.fed + count, room - count
            parts.append(Part(run.slot, tokens, whole=not run.left))
            chosen.append(run)
        return chosen, parts

    def _made(self, run: Running, found: Found, row: int) -> Produced:
        """What a request got, as the row of a step says."""
        request, token = run.request, int(found.ids[row])
        if token == NO_TOKEN:
            return self._fail(run, not_numbers(self.config.family, run))
        run.made += 1
        finished = None
        if token in request.stop_tokens and run.made > request.min_tokens:
            finished = "stop"
        elif run.made >= request.max_tokens:
            finished = "length"
        try:
            if not finished and request.constraint is not None:
                self._go_on(run, token)
        except Exception as error:  # of its grammar alone
            return self._fail(run, error)
        if finished:
            self._end(run)
        asked = request.sampling.logprobs if request.sampling is not None else 0
        if not asked:
            return Produced(request.id, token, finished=finished)
        top = zip(found.top_ids[row, :asked], found.top_logprobs[row, :asked])  # type: ignore[index]
        return Produced(
            request.id,
            token,
            float(found.logprob[row]),  # type: ignore[index]
            tuple((int(i), float(p)) for i, p in top),
            finished,
        )

    def _go_on(self, run: Running, token: int) -> None:
        """Tell the device what may come after a token."""
        matcher = self._matchers[run.request.id]
        matcher.take(token)
        self.steps.sampling().allow(run.slot, matcher.words())

    def score(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """The logprob of each token but the first, given those before it: float32."""
        self._check(tokens, "what is scored")
        if not 2 <= len(tokens) <= self.context:
            raise UserError(
                "cannot score so many tokens",
                op="score",
                got=len(tokens),
                expected=f"2 to {self.context}, the context",
            )
        if not self.slots or not self.pool.fits(len(tokens)):
            raise UserError(
                "the engine is busy", op="score", expected="a free slot and pages", got=repr(self)
            )
        slot = self.slots[-1]
        try:
            self._seat(slot, SCORING, len(tokens))
            with override(determinism=self.determinism):
                return self.steps.score(slot, tokens)
        finally:
            if SCORING in self.pool.owned:
                self.pool.give_back(SCORING)


def not_numbers(family: str, run: Running) -> UserError:
    """The error of a request whose logits say nothing."""
    request = run.request
    return UserError(
        "the logits of the next token are not finite",
        op=f"generate ({family})",
        expected="numbers, of which some are above -inf",
        got=f"NaN or infinity at position {len(request.tokens) + run.made}, after "
        f"{len(request.tokens)} tokens of the prompt and {run.made} of the answer",
        location=request.location,
        hint="the weights have NaN or are too large for the dtype "
        "(dtype='float32'?), or logit_bias leaves no token",
    )


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"bad {name}", op="Engine", expected="a whole number from 1 on", got=value)
    return value


def _cache_dtype(model: Decoder, wanted: Any) -> DType:
    """The dtype of keys and values: as asked for, or as the model computes."""
    if wanted is not None:
        return dtype_of(wanted)
    found = model.norm.weight.dtype
    return found if found.is_float else bfloat16


__all__ = ["Engine"]
