"""The check of Bodies that the Schedule made, where the Config asks for it.

Kernels that a Graph calls are checked always (`call.py`). Invariant: no Body that was found wrong
is emitted.
"""

from __future__ import annotations

from ..core.target import Target
from ..tile.build import Body
from ..tile.check import PLACED_OPS, verify_body
from ..tile.prove import require


def check_body(body: Body, kind: str, target: Target) -> Body:
    """The pass: races, deadlock and fences of a library kernel with what fusion has put into it."""
    placed = any(node.op.name in PLACED_OPS for node in body.block.all_nodes())
    if placed and kind != "call":
        verify_body(body, "placed", target, "schedule.body_check")
        require(body, target, "schedule.body_check")
    return body
