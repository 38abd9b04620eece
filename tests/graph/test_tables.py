"""No op lacks a row in any table, and every differentiable op has a Case."""

import pytest
from cases import CASES, LOOPS

from tilegrad.graph import batch, forward, grad, interpret, ops

TABLES = {
    "REFERENCE": interpret.REFERENCE,
    "VJP": grad.VJP,
    "JVP": forward.JVP,
    "BATCH": batch.BATCH,
}


@pytest.mark.parametrize("name", TABLES)
def test_every_op_has_a_row(name: str) -> None:
    missing = [op.name for op in ops.graph.ops.values() if op not in TABLES[name]]
    assert missing == []


def test_every_differentiable_op_has_a_case() -> None:
    covered = {c.op for c in CASES + LOOPS} | {ops.call}
    nothing = (grad.no_derivative, grad.refused)
    flows = {op for op, rule in grad.VJP.items() if rule not in nothing}
    assert {op.name for op in flows - covered} == set()


def test_markers_agree() -> None:
    reverse = {op for op, rule in grad.VJP.items() if rule is grad.no_derivative}
    ahead = {op for op, rule in forward.JVP.items() if rule is forward.no_derivative}
    assert reverse == ahead
    reverse = {op for op, rule in grad.VJP.items() if rule is grad.refused}
    ahead = {op for op, rule in forward.JVP.items() if rule is forward.refused}
    assert reverse == ahead
