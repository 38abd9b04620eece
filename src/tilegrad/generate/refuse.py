"""What the engine refuses, and how requests fail: checks and their errors.

Invariant: what passes `refuse_request` can be served by an engine that has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.errors import UserError
from .grammar import Matcher
from .ongoing import Ongoing
from .pages import PagePool
from .request import Request


def refuse_request(request: Request, vocabulary: int, context: int, pool: PagePool) -> None:
    """An error for what can never be served."""
    refuse_tokens(request.tokens, vocabulary, "a prompt")
    if request.sampling is not None and request.sampling.logit_bias:
        refuse_tokens(list(request.sampling.logit_bias), vocabulary, "logit_bias")
    if request.most > context:
        raise UserError(
            "the prompt and its answer are longer than the context",
            op="Engine.add",
            expected=f"at most {context} tokens",
            got=f"{len(request.tokens)} of the prompt and max_tokens={request.max_tokens}",
        )
    if not pool.can_ever_fit(request.most):
        raise UserError(
            "the cache can never hold this request",
            op="Engine.add",
            expected=f"at most {pool.pages * pool.page} tokens",
            got=request.most,
            hint="lower max_tokens, or give the engine more pages",
        )


def refuse_tokens(tokens: Sequence[int], vocabulary: int, what: str) -> None:
    """An error for ids that the model does not have."""
    if len(tokens) and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        wrong = [t for t in tokens if not 0 <= t < vocabulary]
        raise UserError(
            f"{what} has tokens that are not in the vocabulary",
            op="Engine",
            expected=f"0 to {vocabulary - 1}",
            got=wrong[:5],
        )


def refuse_open_end(matcher: Matcher, request: Request) -> None:
    """An error for a constrained request that would not end where its grammar does."""
    if not matcher.ends <= request.stop_tokens:
        raise UserError(
            "a constrained request must end at the model's own end",
            op="Engine.add",
            expected=f"{sorted(matcher.ends)} in stop_tokens",
            got=sorted(request.stop_tokens),
        )


def not_numbers(family: str, work: Ongoing) -> UserError:
    """The error of a request whose logits say nothing."""
    return UserError(
        "the logits of the next token are not finite",
        op=f"generate ({family})",
        expected="numbers, of which some are above -inf",
        got=f"NaN or infinity at position {len(work.known)}, after "
        f"{work.prompt} tokens of the prompt and {work.made} of the answer",
        location=work.request.location,
        hint="the weights have NaN or are too large for the dtype "
        "(dtype='float32'?), or logit_bias leaves no token",
    )


def positive(name: str, value: Any) -> int:
    """A whole number from 1 on, or an error."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"bad {name}", op="Engine", expected="a whole number from 1 on", got=value)
    return value


__all__ = ["not_numbers", "positive", "refuse_open_end", "refuse_request", "refuse_tokens"]
