"""The checks of Bodies: of kernels that are called always, of all others where the Config asks.

Invariant: no Body that was found wrong is emitted.
"""

from __future__ import annotations

from ..core.config import config
from ..core.target import Target
from ..tile.build import Body
from ..tile.check import PLACED_OPS, verify_body, walk
from ..tile.prove import require
from .call import check_call


def check_body(body: Body, kind: str, target: Target) -> Body:
    """The pass: the Body, or an error that says what is wrong with it."""
    if kind == "call":
        check_call(body, target)
    elif config().verify:
        check_placed(body, target)
    return body


def check_placed(body: Body, target: Target) -> None:
    """Races, deadlock and fences of a library kernel with what fusion has put into it."""
    if any(node.op.name in PLACED_OPS for node, _ in walk(body.block)):
        verify_body(body, "placed", target, "schedule.body_check")
        require(body, target, "schedule.body_check")
