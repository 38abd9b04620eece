"""Models on a chip under design: what `--chip` changes, and the table of what the chip did.

Invariant: cycles and energy are the array's, by closed forms; what the host did is not in them.
"""

from __future__ import annotations

from typing import Any

import typer

CHIPS = "npu"  # the kind of device that chips under design are


def on_chip(device: str | None, chip: str | None, dtype: str | None) -> dict[str, Any]:
    """What a chip changes of how a model is opened: its device, int8, floats of 32 bits beside."""
    if device is None and chip is None:
        return {}
    from ..runtime.device import KINDS, device_name

    kind = CHIPS if device is None else device_name(device, "run").partition(":")[0]
    opener: Any = KINDS.get(kind)
    if not hasattr(opener, "open_chip"):
        if chip is not None:
            raise typer.BadParameter(f"--chip is for --device {CHIPS}")
        return {}
    where = device_name(device or CHIPS) if chip is None else opener.open_chip(chip)
    return {"device": where, "quantization": "int8", "dtype": dtype or "float32"}


def chip_table(device: str, prompt: int, answer: int) -> str:
    """What the array of a chip did for an answer, by closed forms."""
    from ..runtime.device import device as opened

    machine: Any = opened(device)
    account, p = machine.account(), machine.parameters
    spent, tokens = account.counters, max(1, prompt + answer)
    parts = ", ".join(f"{name} {1e-9 * pj:.3g}" for name, pj in spent.energy.items() if pj)
    rate = tokens / account.seconds if account.seconds else 0.0
    rows = [
        ("chip", f"{p.name}: {p.rows} x {p.columns} {p.element}, {p.dataflow}, {p.clock:g} MHz"),
        ("tokens", f"{prompt} of the prompt, {answer} of the answer"),
        ("multiplications", f"{account.macs:,} in {account.launches:,} launches"),
        ("cycles", f"{spent.cycles:,}, {spent.cycles // tokens:,} a token (closed forms)"),
        ("seconds", f"{account.seconds:.4g}, {rate:.4g} tokens/s"),
        ("energy", f"{1e3 * account.energy:.4g} mJ: {parts}"),
        ("utilisation", f"{100 * account.utilisation:.2f}% of the multipliers"),
        ("host", "attention, norms and drawing tokens: not in these cycles"),
    ]
    return "\n".join(f"{name:16}{text}" for name, text in rows)


__all__ = ["chip_table", "on_chip"]
