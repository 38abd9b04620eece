"""The engine: requests in, tokens out, several requests in one step.

The Batcher says what the next step runs, Steps run it, and the engine tells the device what it
must know of requests that begin. On a GPU the next step is begun before the ids of the last one
are read: how long requests are is known without them. A request that stops there leaves a token
in pages that it has no more, which later steps write over.
Invariant: a request's tokens do not depend on its neighbours, nor on whether they fail, nor on how
often it was sent back to wait; its slot and its pages are free again as soon as it is finished,
cancelled or failed. The file is long because one class has the whole life of a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import nn
from ..core.config import config as settings
from ..core.config import override
from ..core.dtype import DType, bfloat16, dtype_of
from ..core.errors import UserError
from ..models.decoder.config import DecoderConfig
from ..models.decoder.model import Decoder
from ..runtime.buffer import HOST
from ..runtime.limits import limits_of
from ..tensor.placement import default_device, use
from .adapters import Adapters, no_adapter
from .batcher import Batch, Batcher
from .canary import Canary, Marks
from .features import Features
from .grammar import Grammars, Matcher
from .ledger import write
from .ongoing import Ongoing
from .pages import PagePool
from .refuse import not_numbers, positive, refuse_open_end, refuse_request, refuse_tokens
from .request import Produced, Request
from .resident import Resident
from .sampling import NO_TOKEN, Sampling, Variant
from .sampling_limits import SERVED
from .scoring import Scoring
from .speculative import Proposer, Speculation, orders_of
from .step import Rows
from .steps import Found, Launched, Part, Steps, Tell


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
        cache_scales: Any = (1.0, 1.0),
        chunk: int | None = None,
        tell: Tell | None = None,
        words: int | None = None,
        grammars: Grammars | None = None,
        determinism: str | None = None,
        prefix_cache: bool = True,
        canary: bool = False,
        adapters: Adapters | None = None,
        proposer: Proposer | None = None,
        guesses: int = 3,
    ) -> None:
        """`pages` is the size of the pool; all requests can have the whole context if None.

        Keys and values of 8 bits have `cache_scales`, as `PagedCache` takes them.
        `determinism` is the level that steps are compiled for, the Config's if None; how products
        round (`dots`) is the Config's as it is now: all steps over one cache have the same. A step
        has at most `chunk` tokens. `words` is how many ids the tokenizer has, if fewer than
        the model: no other is picked. Requests with a Constraint need `grammars`. `canary` checks
        after every step that pages have the tokens they must. `adapters` are made for this model
        and one slot more than there are requests. A `proposer` guesses so many tokens of a request
        at most, which steps then verify.
        """
        config = model.config
        device = default_device() if device is None else use(device, "Engine")
        self.model, self.config, self.requests = model, config, positive("requests", requests)
        self.context = _context(config, context)
        self.chunk = max(requests, chunk or limits_of(device).chunk)
        kept = {"dtype": _cache_dtype(model, cache_dtype), "scales": cache_scales}
        self.cache = _cache(model, device, requests, self.context, page, pages, kept)
        count, most_pages = self.cache.pages, self.cache.most_pages
        # idle pages cost a CPU memory that it would not use otherwise
        idle = max(most_pages, count // 4) if device == HOST else None
        self.pool = PagePool(count, self.cache.page, idle)
        self.batcher = Batcher(requests, self.pool, self.chunk, prefix_cache, self.cache.kind)
        marks = Marks(requests + 1, count, self.cache.device) if canary else None
        tell = tell or (lambda *_: None)
        stepped = model if adapters is None else adapters.model
        self.speculation = _speculation(proposer, guesses, requests, self.context, canary)
        more, features = _attached(self.speculation, stepped, self.cache, self.chunk)
        rows = Rows(requests + 1, self.cache.device, marks, adapters, features)
        self.steps = Steps(stepped, self.cache, rows, self.chunk, tell, words, more)
        self.adapters = adapters
        self.determinism = determinism or settings().determinism
        self.numerics = {"determinism": self.determinism, "dots": settings().dots}
        self.grammars = grammars
        # a step begins before the last is read
        self.overlaps = device != HOST and not canary and proposer is None
        self._canary = None if marks is None else Canary(marks, self.cache, count)
        self._resident = Resident(self.cache, self.pool) if device == HOST else None
        self._table = np.zeros((requests + 1, most_pages), np.int32)  # as the device has it
        self._sampled: set[int] = set()  # slots whose sampling was set, and not cleared yet
        self._masked: set[int] = set()  # slots that may not get every token
        self._under_way: deque[tuple[Batch, Launched]] = deque()
        self._last: Batch | None = None  # that was begun

    def __repr__(self) -> str:
        return (
            f"<engine: {len(self.running)} of {self.requests} requests run, "
            f"{len(self.waiting)} wait, context {self.context}>"
        )

    @property
    def running(self) -> Mapping[Hashable, Ongoing]:
        """Requests that have a slot."""
        return self.batcher.running

    @property
    def waiting(self) -> Mapping[Hashable, Ongoing]:
        """Requests that have none."""
        return self.batcher.waiting

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self.waiting)

    # ---- requests ---------------------------------------------------------------------------

    def __contains__(self, id: Hashable) -> bool:
        return self.batcher.find(id) is not None

    def add(self, request: Request) -> None:
        """Queue a request; what can never be served is an error at once."""
        if request.id in self:
            raise UserError("two requests have one id", op="Engine.add", got=request.id)
        refuse_request(request, self.config.vocabulary, self.context, self.pool)
        self._refuse_adapter(request.adapter)
        if self.speculation is not None:
            request = self.speculation.seeded(request)
        matcher = None if request.constraint is None else self._matcher(request)
        self.batcher.add(request).matcher = matcher

    def _refuse_adapter(self, name: str) -> None:
        if self.adapters is not None:
            self.adapters.refuse(name)
        elif name:
            raise no_adapter(name, ())

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
        refuse_open_end(matcher, request)
        return matcher

    def cancel(self, id: Hashable) -> bool:
        """Forget a request and free what it has; whether there was one."""
        work = self.batcher.find(id)
        if work is not None:
            self._end(work)
        return work is not None

    def _end(self, work: Ongoing, wrong: bool = False) -> None:
        """Take back what a request has; nothing here can fail."""
        self.batcher.end(work, wrong=wrong)
        if self.speculation is not None:
            self.speculation.forget(work)
        if not self.running:
            self._under_way.clear()

    def _fail(self, work: Ongoing, error: Exception) -> Produced:
        self._end(work, wrong=True)
        return Produced(work.request.id, finished="error", error=error)

    # ---- what the device must know of requests that begin --------------------------------------

    def _admit(self) -> list[Produced]:
        """Seat those that wait while there is room; one that cannot begin ends in an error.

        The device is told of all of them in one copy of the table and one of the sampling.
        """
        failed, seated, sampled = [], [], False
        while (work := self.batcher.admit()) is not None:
            self._table[work.slot] = 0
            self._table[work.slot, : len(work.pages)] = work.pages
            seated.append(work.slot)
            if self.adapters is not None:
                self.adapters.seat(work.slot, work.request.adapter)
            try:
                sampled |= self._set_sampling(work)
                if self._canary is not None:
                    self._canary.seated(work)
            except Exception as error:  # of one request alone: no step has begun
                failed.append(self._fail(work, error))
        if seated:
            first = min(seated)
            write(self.cache.table, first, self._table[first : max(seated) + 1])
        if sampled:
            self.steps.sampling().send()
        if self.adapters is not None:
            self.adapters.send()
        return failed

    def _set_sampling(self, work: Ongoing) -> bool:
        """How a request samples, if not the likeliest token; whether a row has to be sent."""
        request, slot = work.request, work.slot
        if work.matcher is not None:
            self._masked.add(slot)
            self.steps.sampling().allow(slot, work.matcher.words())
        elif slot in self._masked:
            self.steps.sampling().allow(slot, None)
            self._masked.discard(slot)
        if request.variant != Variant():
            self._sampled.add(slot)
            self.steps.sampling().set_row(
                slot,
                request.sampling or Sampling(),
                request.tokens,
                work.known[work.prompt :],
                held_back=request.held_back,
                until=work.prompt + request.min_tokens,
                send=False,
            )
            return True
        if slot in self._sampled:
            self.steps.sampling().clear_row(slot, send=False)
            self._sampled.discard(slot)
            return True
        return False

    # ---- steps ------------------------------------------------------------------------------

    def prepare(self, tell: Tell | None = None, variants: Sequence[Variant] = SERVED) -> None:
        """Compile and bind all that steps may need, so that no request waits for it later.

        `tell("prepare", done, total)` hears how far it is.
        """
        with override(**self.numerics):
            self.steps.prepare(variants, tell or self.steps.tell)
            if self.speculation is not None:
                self.speculation.proposer.prepare(tell or self.steps.tell, variants)

    def step(self) -> list[Produced]:
        """Run one step: a token for each request that decodes, a chunk of prompts beside them.

        A request that cannot begin, or whose logits are no numbers, ends in an error of its own.
        A step that fails, or is interrupted, ends the requests that run: nobody knows how far
        it came.
        """
        try:
            with override(**self.numerics):
                produced = self._begin()
            if not self._under_way:
                return produced
            batch, launched = self._under_way.popleft()
            found = launched.wait()
            produced += self._checked(batch)
        except BaseException:
            for work in list(self.running.values()):
                self._end(work, wrong=True)
            raise
        if batch.guesses is not None:
            return produced + self._verified(batch, found)
        if self.speculation is not None:
            self.speculation.stepped(batch)
        for row, work in enumerate(batch.ongoing):
            if batch.whole[row] and self.running.get(work.request.id) is work:
                produced.append(self._made(work, found, row))
        return produced

    def _begin(self) -> list[Produced]:
        """Begin steps: one, or where they overlap a second one."""
        failed: list[Produced] = []
        if self.speculation is not None:
            self.speculation.saw(self.running)
        while len(self._under_way) < 1 + self.overlaps:
            if self._under_way and self._under_way[0][0].constrained:
                break  # what is allowed next depends on the id
            failed += self._admit()
            batch = self.batcher.batch(under_way=bool(self._under_way))
            if batch is None:
                break
            if self._resident is not None:
                self._resident.follow()
            if self.speculation is not None:
                batch.guesses = self.speculation.guess(batch, self.batcher)
            self._under_way.append((batch, self._launch(batch)))
            self.batcher.begun(batch)
        return failed

    def _launch(self, batch: Batch) -> Launched:
        if batch is not self._last:
            self._last = batch
            self._table[batch.slots, batch.columns] = batch.tails
            if self._canary is not None:
                self._canary.grown(batch.ongoing)
        if batch.guesses is not None:
            orders = orders_of(batch.ongoing, batch.guesses, self.pool.page)
            columns = [(length - 1) // self.pool.page for length in orders["lengths"]]
            self._table[orders["slots"], columns] = orders["tails"]
            return self.steps.verify(orders, batch.variant, max(orders["lengths"]) + 1)
        if batch.decodes:
            return self.steps.decode(
                batch.slots, batch.tails, batch.columns, batch.variant, batch.keys
            )
        parts = [
            Part(
                work.slot,
                tail,
                work.fed + count,
                None if work.decodes else work.known[work.fed : work.fed + count],
                whole,
            )
            for work, count, tail, whole in zip(
                batch.ongoing, batch.counts, batch.tails, batch.whole
            )
        ]
        return self.steps.ragged(parts, batch.variant)

    def _verified(self, batch: Batch, found: Found) -> list[Produced]:
        """What requests got whose next tokens were guessed: those up to the first wrong guess."""
        assert self.speculation is not None
        produced: list[Produced] = []
        for work, rows in self.speculation.true_rows(batch, found.ids.tolist()):
            for row in rows:
                if self.running.get(work.request.id) is work:
                    produced.append(self._made(work, found, row))
            if self.running.get(work.request.id) is work:
                self.batcher.came_true(work, len(rows) - 1)
                # several rows wrote these
                write(self.cache.lengths, work.slot, np.array([work.fed]))
                write(self.steps.rows.last, work.slot, np.array(work.known[-1:]))
        return produced

    def _checked(self, batch: Batch) -> list[Produced]:
        """What the canary found: requests whose pages are not theirs alone end in errors."""
        if self._canary is None:
            return []
        damaged = self._canary.damaged(batch, list(self.running.values()))
        self.pool.forget(self._canary.accept())
        return [self._fail(self.running[id], error) for id, error in damaged.items()]

    def _made(self, work: Ongoing, found: Found, row: int) -> Produced:
        """What a request got, as the row of a step says."""
        request, token = work.request, int(found.ids[row])
        if token == NO_TOKEN:
            return self._fail(work, not_numbers(self.config.family, work))
        self.batcher.took(work, token)
        finished = None
        if token in request.stop_tokens and work.made > request.min_tokens:
            finished = "stop"
        elif work.made >= request.max_tokens:
            finished = "length"
        try:
            if not finished and work.matcher is not None:
                work.matcher.take(token)
                self.steps.sampling().allow(work.slot, work.matcher.words())
        except Exception as error:  # of its grammar alone
            return self._fail(work, error)
        if finished:
            self._end(work)
        asked = request.sampling.logprobs if request.sampling is not None else 0
        if not asked:
            return Produced(request.id, token, finished=finished, cached=work.cached)
        top = zip(found.top_ids[row, :asked], found.top_logprobs[row, :asked])  # type: ignore[index]
        return Produced(
            request.id,
            token,
            float(found.logprob[row]),  # type: ignore[index]
            tuple((int(i), float(p)) for i, p in top),
            finished,
            cached=work.cached,
        )

    def score(self, tokens: Sequence[int], adapter: str = "") -> np.ndarray[Any, Any]:
        """The logprob of each token but the first, given those before it: float32."""
        refuse_tokens(tokens, self.config.vocabulary, "what is scored")
        if not 2 <= len(tokens) <= self.context:
            raise UserError(
                "cannot score so many tokens",
                op="score",
                got=len(tokens),
                expected=f"2 to {self.context}, the context",
            )
        scoring = self.scoring(tokens, adapter=adapter)
        if scoring is None:
            raise UserError(
                "the engine is busy", op="score", expected="a free slot and pages", got=repr(self)
            )
        with scoring:
            while not scoring.step():
                pass
        return scoring.logprobs

    def scoring(self, tokens: Sequence[int], shown: int = 0, adapter: str = "") -> Scoring | None:
        """What scores tokens a part at a time, so that steps can come between; None while no slot
        or too few pages are free."""
        self._refuse_adapter(adapter)
        needed = self.pool.needed(len(tokens))
        if not self.batcher.slots or needed > self.pool.available:
            return None
        slot, pages = self.batcher.slots.pop(), [self.pool.take() for _ in range(needed)]
        self._table[slot, :needed] = pages
        write(self.cache.table, slot, self._table[slot : slot + 1])
        if self.adapters is not None:
            self.adapters.seat(slot, adapter)
            self.adapters.send()
        return Scoring(self, tokens, shown, slot, pages)


def _context(config: DecoderConfig, wanted: int | None) -> int:
    """The context: as asked for, or the model's, which it cannot pass."""
    found = positive("context", wanted or config.context)
    if found > config.context:
        raise UserError(
            "the context is longer than the model's",
            op="Engine",
            expected=f"at most {config.context}",
            got=found,
        )
    return found


def _cache(
    model: Decoder,
    device: str,
    requests: int,
    context: int,
    page: int | None,
    pages: int | None,
    kept: dict[str, Any],
) -> nn.PagedCache:
    """Pages for all requests and a table of theirs, with one row more that is nobody's."""
    config = model.config
    page = limits_of(device).page if page is None else positive("page", page)
    most_pages = -(-context // page)
    return nn.PagedCache(
        config.layers,
        most_pages * requests if pages is None else positive("pages", pages),
        page,
        config.key_heads,
        config.head_width,
        requests=requests + 1,
        most_pages=most_pages,
        **kept,
        device=device,
    )


def _attached(
    speculation: Speculation | None, model: Decoder, cache: nn.PagedCache, chunk: int
) -> tuple[int, Features | None]:
    """Guesses that a step may have, and the features it keeps for them."""
    if speculation is None:
        return 0, None
    return speculation.room, speculation.attach(model, cache, chunk)


def _speculation(
    proposer: Proposer | None, guesses: int, requests: int, context: int, canary: bool
) -> Speculation | None:
    if proposer is None:
        return None
    if canary:
        raise UserError(
            "the canary knows no guesses", op="Engine", expected="canary or proposer, not both"
        )
    if positive("guesses", guesses) >= context:
        raise UserError(
            "more guesses than the context holds",
            op="Engine",
            expected=f"fewer guesses than the {context} tokens of the context",
            got=guesses,
        )
    return Speculation(proposer, guesses, requests)


def _cache_dtype(model: Decoder, wanted: Any) -> DType:
    """The dtype of keys and values: as asked for, or as the model computes."""
    if wanted is not None:
        return dtype_of(wanted)
    found = model.norm.weight.dtype
    return found if found.is_float else bfloat16


__all__ = ["Engine"]
