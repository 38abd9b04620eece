"""Fingerprints: equal for Graphs of equal structure, whatever their inputs are called.

Invariant: two sets of roots with the same fingerprint compute the same function of their
arguments, in order; locations and Node serials do not matter. A UserLine, which an attr names,
matters unless `lines` are given, which number them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from .block import Block
from .literal import ATTRIBUTE_PARSERS
from .node import Node, topological


class UserLine(str):
    """A line of the user's, 'file:line', as the attr of a Node whose error names it."""

    __slots__ = ()
    text_name = "place"  # of the attr, as text has it

    def to_text(self) -> str:
        """The line itself."""
        return str(self)


ATTRIBUTE_PARSERS[UserLine.text_name] = UserLine


def structure(
    arguments: Sequence[Node],
    results: Sequence[Node],
    lines: dict[UserLine, int] | None = None,
    is_apart: Callable[[Node], bool] | None = None,
    apart: list[Node] | None = None,
) -> tuple[Any, ...]:
    """A hashable description of the function from arguments to results. Nodes for which
    `is_apart` holds (outside of Blocks) are told by their type alone and put into `apart`; with
    `lines` numbers stand for the user's lines, which are added there in order."""
    number: dict[Node, int] = {a: i for i, a in enumerate(arguments)}
    rows: list[Any] = [tuple(a.type for a in arguments)]
    for node in topological(results, stop=number.__contains__):
        if node in number:
            continue
        number[node] = len(number)
        if is_apart is not None and is_apart(node):
            apart.append(node)  # type: ignore[union-attr]
            rows.append(node.type)
            continue
        attrs = tuple([repr(v) if v.__class__ is float else v for v in node.attrs.values()])
        if lines is not None:
            attrs = tuple(
                [lines.setdefault(v, len(lines)) if v.__class__ is UserLine else v for v in attrs]
            )
        row: tuple[Any, ...] = (node.op, tuple([number[i] for i in node.inputs]), attrs)
        if node.blocks:
            row += tuple([_block(b, number, lines) for b in node.blocks])
        rows.append(row)
    rows.append(tuple([number[r] for r in results]))
    return tuple(rows)


def _block(
    block: Block, outer: dict[Node, int], lines: dict[UserLine, int] | None
) -> tuple[Any, ...]:
    captured = block.captures()
    inner = structure(block.arguments + captured, block.results, lines)
    return (tuple(outer[c] for c in captured), inner)


def digest(*parts: Any) -> str:
    """A stable content hash of the text of the parts."""
    state = hashlib.sha256()
    for part in parts:
        state.update(repr(part).encode())
        state.update(b"\0")
    return state.hexdigest()[:32]
