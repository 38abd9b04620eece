"""Which kernel computes an attention or attention_backward Node on a Target, and its Bodies.

Each kind of machine has a file of its own with `why_not(node, shape, target)` and
`launches(node, shape, target, wanted, name)`, which gives Bodies whose parameters are named: an
input of the Node by its number, a result by its number, or scratch by its type.

Invariant: `why_not` is '' exactly for Nodes that the Schedule lowers to a kernel; all others are
written in ordinary ops before they come here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.errors import InternalError
from ..core.target import Target
from ..graph import ops
from ..graph.attention_types import Sizes, sizes
from ..ir.node import Node
from ..ir.symbol import Size, multiply
from ..ir.types import Tuple, product
from ..kernels.attention.shape import AttentionShape
from ..tile.build import Body
from . import attention_cpu, attention_gpu

WhyNot = Callable[[Node, AttentionShape, Target], str]
# Bodies with what each parameter stands for: ('input', i), ('result', i) or ('scratch', type)
Launches = Callable[[Node, AttentionShape, Target, set[int], str], list[tuple[Body, list[Any]]]]


def kernels_for(target: Target) -> tuple[WhyNot, Launches]:
    """The file for a Target, by whether its programs are blocks of threads."""
    found = attention_gpu if target.has_threads else attention_cpu
    return found.why_not, found.launches


def _sizes(node: Node) -> Sizes:
    q, k, v = node.inputs[:3]
    return sizes(q, k, v, node.attrs["orders"])


def shape_of(node: Node) -> AttentionShape:
    """Sizes and options of an attention or attention_backward Node."""
    s = _sizes(node)
    options = {
        name: node.attrs[name]
        for name in ("scale", "band", "softcap", "dropout", "extras", "orders")
    }
    return AttentionShape(
        s.batch,
        s.heads,
        s.key_heads,
        s.queries,
        s.keys,
        s.width,  # type: ignore[arg-type]
        s.value_width,  # type: ignore[arg-type]
        node.inputs[0].dtype,
        **options,
    )


def why_not(node: Node, target: Target | None) -> str:
    """Why no kernel of the Target takes the Node; '' where one does."""
    if target is None:
        return "no kernel for this machine"
    shape = shape_of(node)
    if not isinstance(shape.width, int) or not isinstance(shape.value_width, int):
        return "the head size is not known"
    return kernels_for(target)[0](node, shape, target)


def lower_attention(
    node: Node, reads: Sequence[Node], stored: Sequence[Node], target: Target, name: str
) -> list[tuple[Body, list[tuple[str, Any]]]]:
    """Bodies with what each parameter stands for: ('read', i), ('store', i), ('scratch', type)."""
    if not isinstance(node.type, Tuple):
        raise InternalError("schedule.attention", f"no kernel for {node!r} on {target.name}")
    places = {v.attrs["index"]: i for i, v in enumerate(stored) if v.op is ops.get}
    where = {x: i for i, x in enumerate(reads)}
    found = []
    for body, given in kernels_for(target)[1](node, shape_of(node), target, set(places), name):
        roles: list[tuple[str, Any]] = []
        for kind, what in given:
            if kind == "input":
                roles.append(("read", where[node.inputs[what]]))
            elif kind == "result" and what in places:
                roles.append(("store", places[what]))
            elif kind == "result":  # nobody wants it, the kernel still writes it
                roles.append(("scratch", (node.type.items[what], "result", what)))
            else:
                roles.append((kind, what))
        found.append((body, roles))
    return found


def flops_of(node: Node) -> Size:
    """FLOPs of an attention or attention_backward Node, as if every key were seen."""
    s = _sizes(node)
    products = (1, 1) if node.op is ops.attention else (3, 2)  # of width and of value width
    widths = multiply(s.width, products[0]) + multiply(s.value_width, products[1])
    return multiply(multiply(product(s.scores), widths), 2)
