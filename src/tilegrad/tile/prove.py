"""The checks before launch: everything that can be said of a Body without running it.

`check_body` gathers the Findings of `protocol` (races, deadlock, fences, uninitialised places),
`dependent`, `handover`, `initialised`, `budget` and `banks`; `require` turns errors into one
exception that lists all of them. A Finding of a trace that left out the middle of a loop counts
only if the whole loop shows it too, where that is short enough to be run. Invariant: a Body is
read and never changed, and no data is computed, so a kernel of real size is judged in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ..core.errors import InternalError, UserError
from ..core.target import Target
from .banks import check_banks
from .budget import check_budget
from .build import Body
from .check import PLACED_OPS
from .dependent import check_dependent
from .finding import Finding, finding
from .handover import check_handover
from .initialised import check_initialised
from .protocol import check_protocol
from .skeleton import Skeleton, TooLong

ENOUGH = 4_000  # events, after which only the first and last programs are run


def check_body(body: Body, target: Target | None = None) -> list[Finding]:
    """Findings of all checks, errors first; those of a machine only if there is one."""
    found: dict[Finding, None] = {}
    if any(node.op.name in PLACED_OPS for node in body.block.all_nodes()):
        skeleton = Skeleton(body)
        found.update(dict.fromkeys(check_dependent(skeleton)))
        found.update(dict.fromkeys(_protocol(skeleton)))
        found.update(dict.fromkeys(check_handover(body)))
    else:
        found.update(dict.fromkeys(check_initialised(body)))
    if target is not None:
        found.update(dict.fromkeys(check_budget(body, target)))
        found.update(dict.fromkeys(check_banks(body, target)))
    return sorted(found, key=lambda f: f.severity != "error")


def _protocol(skeleton: Skeleton) -> list[Finding]:
    found: list[Finding] = []
    for scenario in skeleton.scenarios():
        if scenario.extra and skeleton.events > ENOUGH:
            break
        try:
            here = check_protocol(skeleton, scenario)
        except TooLong:
            text = f"{skeleton.body.name} is too long to be followed for program {scenario.program}"
            hint = "stages and parities computed from loop indices by // and % let it be cut"
            here = [finding("unproved", text, hint=hint, severity="warning")]
        if any(f.severity == "error" for f in here):
            with suppress(TooLong):
                here = check_protocol(skeleton, scenario, whole=True)
        found += here
        if any(f.severity == "error" for f in here):
            break  # the same again in other programs
    return found


def require(
    body: Body, target: Target | None = None, maker: str = "", also: Sequence[Finding] = ()
) -> list[Finding]:
    """Raise one error that lists all Findings of level 'error'; gives the warnings.

    `maker` names the pass that made the Body: then the fault is ours, else the kernel's author's.
    `also` are Findings of who made it.
    """
    found = [*check_body(body, target), *also]
    errors = [f for f in found if f.severity == "error"]
    if errors:
        text = f"{body.name} fails {len(errors)} checks:\n" + "\n".join(map(str, errors))
        if maker:
            raise InternalError(maker, text)
        raise UserError(text, location=errors[0].location)
    return found
