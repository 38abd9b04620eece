"""PTX texts assembled side by side."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from tilegrad.core.config import adopt, config, usable_cores
from tilegrad.targets.ptx.assemble import Assembly, assemble


def assemble_all(texts: Mapping[str, str], arch: str = "sm_90a") -> dict[str, Assembly]:
    """The Assemblies of several texts by the same names."""
    workers = max(1, min(usable_cores(), len(texts)))
    with ThreadPoolExecutor(workers, initializer=adopt, initargs=(config(),)) as pool:
        return dict(zip(texts, pool.map(lambda text: assemble(text, arch), texts.values())))
