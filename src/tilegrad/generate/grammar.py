"""Grammars over the tokens of a model: which ids may come next, whatever the model would like.

`Grammars(tokenizer, vocabulary).matcher(constraint)` compiles a Constraint by llguidance; a Matcher
then says the ids that may come (`words`, a bit each) and takes the one that came. A compiled
Constraint is kept, so that its next Matcher is a copy.

A compiler that follows references from rule to rule recurses, and its stack is not checked: a
schema of 64 KiB can chain thousands of them. So it runs in a thread with a stack for the worst
of them, and a caller waits only so long.
Invariant: an id that is allowed keeps the answer a prefix of a word of the grammar; the model's
end is allowed exactly where the answer is a whole word; ids without bytes never are.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.errors import UserError
from ..core.lock import new_lock
from ..models.tokens.tokenizer import Tokenizer
from .constraint import LIMITS, Constraint, ConstraintLimits, check, exceeded, malformed

STACK = 512 << 20  # bytes of the compiling thread; memory is taken only where it is used
KEPT = 64  # compiled Constraints
COMPILING = 2  # at once, those that nobody waits for any more included
STACK_SIZE = new_lock()  # the size for new threads is one of the process
WHITESPACE = r"[ \n\r\t]{1,24}"  # between two tokens of JSON: no model fills an answer with it
Words = np.ndarray[Any, Any]


class Matcher:
    """Where one answer is in its grammar."""

    def __init__(self, constraint: Constraint, compiled: Any, ends: frozenset[int], words: int):
        self.constraint, self.ends = constraint, ends
        self._compiled, self._words = compiled, words

    def words(self) -> Words:
        """The ids that may come next: bit t % 32 of the int32 word t // 32."""
        found = np.frombuffer(self._compiled.compute_bitmask(), np.int32)
        self._refuse_error()
        out = np.zeros(self._words, np.int32)
        size = min(len(found), len(out))
        out[:size] = found[:size]
        if not out.any():
            raise self._failed("no token of the model fits here")
        return out

    def take(self, token: int) -> None:
        """Go on by the id that came."""
        self._compiled.consume_token(token)
        self._refuse_error()

    @property
    def is_whole(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._compiled.is_accepting())

    def _refuse_error(self) -> None:
        if self._compiled.is_error():
            raise self._failed(_plain(self._compiled.get_error()))

    def _failed(self, why: str) -> UserError:
        return UserError(
            f"the {self.constraint.kind} of this request cannot be followed any further",
            op="constraint",
            got=why,
        )


class Grammars:
    """Compiles Constraints for one tokenizer; threads may share it."""

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: int, limits: ConstraintLimits = LIMITS
    ) -> None:
        """`vocabulary` is how many ids the model has; those the tokenizer lacks never fit."""
        self.tokenizer, self.vocabulary, self.limits = tokenizer, vocabulary, limits
        self.ends = frozenset(e for e in tokenizer.ends if 0 <= e < len(tokenizer))
        self._lock = new_lock()
        self._tokens: Any = None  # the tokenizer as llguidance has it
        self._kept: OrderedDict[Constraint, Any] = OrderedDict()
        self._compiling: list[threading.Thread] = []

    def matcher(self, constraint: Constraint) -> Matcher:
        """A Matcher at the begin of an answer; what cannot be compiled is an error."""
        with self._lock:
            found = self._kept.get(constraint)
            if found is not None:
                self._kept.move_to_end(constraint)
        if found is None:
            check(constraint, self.limits)
            found = self._compile(constraint)
            with self._lock:
                self._kept[constraint] = found
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        return Matcher(constraint, found.deep_copy(), self.ends, -(-self.vocabulary // 32))

    def _compile(self, constraint: Constraint) -> Any:
        tokens = self._llguidance_tokens()
        made: list[Any] = []

        def work() -> None:
            try:
                made.append(_compiled(constraint, tokens))
            except UserError as error:
                made.append(error)
            except Exception as error:
                made.append(malformed(constraint, _plain(str(error))))

        seconds = self.limits.seconds
        until = time.monotonic() + seconds
        thread = self._begin(work, until)
        if thread is not None:
            thread.join(max(0.0, until - time.monotonic()))
        if thread is None or thread.is_alive():
            raise exceeded(constraint, "takes too long to compile", f"{seconds:g} s", "more")
        if isinstance(made[0], UserError):
            raise made[0]
        return made[0]

    def _begin(self, work: Callable[[], None], until: float) -> threading.Thread | None:
        """Begin to compile as soon as few others do, or never."""
        while True:
            with self._lock:
                self._compiling = [thread for thread in self._compiling if thread.is_alive()]
                if len(self._compiling) < COMPILING:
                    self._compiling.append(_start(work))
                    return self._compiling[-1]
                oldest = self._compiling[0]
            oldest.join(max(0.0, until - time.monotonic()))
            if time.monotonic() >= until:
                return None

    def _llguidance_tokens(self) -> Any:
        """The tokenizer for llguidance, made once."""
        with self._lock:
            if self._tokens is None:
                self._tokens = _llguidance_tokenizer(self.tokenizer, self.ends)
            return self._tokens


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = min(ends), tokenizer.bos
        self.tokens = [bytes(piece) for piece in tokenizer.pieces]
        self.special_token_ids = sorted(tokenizer.hidden | ends)

    def __call__(self, text: Any) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self.tokenizer.encode(plain, add_special=False)


def _llguidance_tokenizer(tokenizer: Tokenizer, ends: frozenset[int]) -> Any:
    llguidance = _library()
    if not len(tokenizer) or not ends:
        raise UserError(
            "a constraint needs the words of the model",
            op="constraint",
            expected="a tokenizer with a token that ends an answer",
            got=repr(tokenizer),
        )
    wrapped = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, ends))
    return llguidance.LLTokenizer(wrapped, eos_token=sorted(ends))


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UserError(
            "constraints need the package llguidance",
            op="constraint",
            hint="pip install 'tilegrad[serve]'",
        ) from None
    return llguidance


def _compiled(constraint: Constraint, tokens: Any) -> Any:
    """The matcher of llguidance at the begin; its first mask, often the dearest, is made here."""
    llguidance = _library()
    limits = llguidance.LLParserLimits(verbose_errors=False)
    grammar = _grammar(llguidance, constraint)
    made = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)
    first = made.deep_copy()
    if not first.is_error():
        first.compute_bitmask()
    if first.is_error():
        raise malformed(constraint, _plain(first.get_error()))
    return made


def _grammar(llguidance: Any, constraint: Constraint) -> str:
    """The Constraint as llguidance has it."""
    if constraint.kind in ("json_schema", "json_object"):
        return llguidance.LLMatcher.grammar_from_json_schema(
            constraint.text or '{"type": "object"}', overrides={"whitespace_pattern": WHITESPACE}
        )
    return llguidance.grammar_from(constraint.kind, constraint.text)


def _start(work: Callable[[], None]) -> threading.Thread:
    """A thread with a large stack, begun."""
    thread = threading.Thread(target=work, name="tilegrad-grammar", daemon=True)
    with STACK_SIZE:
        before = threading.stack_size(STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def _plain(message: str) -> str:
    """An error of llguidance on one short line."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:300]


__all__ = ["Grammars", "Matcher"]
