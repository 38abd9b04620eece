"""Errors that a client sees: a status, a sentence and the parameter at fault.

Invariant: what stands in one is about the request; nothing of the server's inside (paths, lines of
code, addresses) gets into it.
"""

from __future__ import annotations

from typing import Any

from ..core.errors import TilegradError, UserError, shortened

UNREADABLE = "the body cannot be read: it does not have the encoding that its headers say"
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
ANTHROPIC_TYPES = {
    **{400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"},
    **{404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"},
    **{500: "api_error", 503: "overloaded_error", 504: "timeout_error"},
}


class Refused(TilegradError):
    """A request that is not served, with what its client is told."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.retry_after = retry_after

    def openai(self) -> dict[str, Any]:
        """The body of the answer as OpenAI shapes it."""
        kind = TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic(self) -> dict[str, Any]:
        """The body of the answer as Anthropic shapes it."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        message = f"{self.param}: {self.message}" if self.param else self.message
        return {"type": "error", "error": {"type": kind, "message": message}}


def said(error: BaseException) -> str:
    """What a client may read of an error: the sentence of a UserError, nothing of any other."""
    if not isinstance(error, UserError):
        return "internal error"
    text = str(error).split("\n", 1)[0]
    if error.op and text.startswith(f"{error.op}: "):
        text = text[len(error.op) + 2 :]
    if error.expected is not None:
        text += f"; expected: {shortened(error.expected)}"
    if error.got is not None:
        text += f"; got: {shortened(error.got)}"
    return text


def refused_by(error: UserError, param: str | None = None) -> Refused:
    """What a UserError is to a client."""
    return Refused(said(error), param=param)


__all__ = ["UNREADABLE", "Refused", "refused_by", "said"]
