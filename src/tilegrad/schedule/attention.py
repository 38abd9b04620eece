"""Which kernel computes an attention or attention_backward Node on a Target.

Invariant: `why_not` is '' exactly for Nodes that the Schedule lowers to a kernel; all others are
written in ordinary ops before they come here.
"""

from __future__ import annotations

from ..core.target import Target
from ..ir.node import Node


def why_not(node: Node, target: Target | None) -> str:
    """Why no kernel of the Target takes the Node; '' where one does."""
    return "no kernel yet"
