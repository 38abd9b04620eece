"""Language models compiled ahead of time: a Bundle with the model's files, its steps and weights.

`save_llm` makes every step that an LLM can run, for each number of requests and each way to pick a
token, and keeps what was compiled. `LLM(folder)` opens one: its context, requests and pages are
those that it was made for. Invariant: an LLM from a Bundle gives the answers of the LLM that it was
made from, and compiles nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError
from ..core.target import target_named
from ..exchange.fetch import open_model
from ..runtime.buffer import HOST
from ..runtime.bundle import MODEL, check_folder, is_bundle
from ..runtime.limits import Limits, limits_of
from ..tensor.bundle import load_bundle, record, save_bundle
from .load import dtype_for
from .sampling_limits import MOST_LOGPROBS, SERVED, Variant
from .steps import SCORED

if TYPE_CHECKING:
    from .engine import Engine

Tell = Callable[[str, float, float], None]
PROMPT = "The sea was calm, and"
VARIANTS = (Variant(), *SERVED)  # all that requests can ask for: see `sampling_limits.needs`


@dataclass(frozen=True)
class Bundled:
    """An LLM's Bundle that was opened: what it was made for."""

    folder: str
    model: Path
    device: str
    dtype: str
    context: int
    requests: int
    pages: int
    limits: Limits
    cache: str = "auto"  # what keys and values are kept in
    scales: Any = None  # of keys and values of 8 bits
    guesses: int = 0  # of a request that a step verifies at most

    def refuse(
        self,
        device: str,
        dtype: Any,
        context: int | None,
        requests: int,
        adapters: Any = None,
        speculate: Any = None,
        random_weights: bool = False,
        guesses: int | None = None,
    ) -> None:
        """An error where something else is asked for."""
        if random_weights:
            raise UserError(
                "this bundle has weights of its own",
                op="LLM",
                got="random_weights=True",
                hint="open the model itself",
            )
        if speculate is not None and (not self.guesses or speculate != "ngram"):
            raise UserError(
                "this bundle has no steps of what guesses"
                if self.guesses
                else "this bundle has no steps that verify guesses",
                op="LLM",
                expected="speculate='ngram'" if self.guesses else None,
                got=f"speculate={speculate!r}"[:80],
                hint="open the model itself, or make a bundle with guesses that are looked up in "
                "the text so far: tilegrad compile ... --guesses 3",
            )
        if adapters:
            raise UserError(
                "this bundle was made without adapters",
                op="LLM",
                got=f"adapters: {', '.join(map(str, adapters))}",
                hint="open the model itself",
            )
        if device.split(":")[0] != self.device:
            raise self._other("device", self.device, device)
        if dtype is not None and str(dtype) != self.dtype:
            raise self._other("dtype", self.dtype, dtype)
        if context is not None and context != self.context:
            raise self._other("context", self.context, context)
        if guesses is not None and guesses != self.guesses:
            raise self._other("number of guesses", self.guesses, guesses)

    def cache_of(self, wanted: str, scales: Any) -> tuple[str, Any]:
        """What keys and values are kept in, and scales; an error where others are asked for."""
        if not (isinstance(self.cache, str) and isinstance(self.scales, (list, type(None)))):
            raise UserError(
                "this bundle does not say how keys and values are kept",
                op="LLM",
                expected="kv_cache_dtype, a word; kv_cache_scales, a list",
                got=repr((self.cache, self.scales))[:80],
            )
        own = ("auto", self.cache, "fp8_e4m3" if self.cache == "fp8" else self.cache)
        if not isinstance(wanted, str) or wanted not in own or scales is not None:
            raise self._other("kv_cache_dtype", self.cache, wanted if scales is None else "scales")
        return self.cache, self.scales

    def check(self, context: int, pages: int) -> None:
        """An error where memory cannot hold what it was made for."""
        if context < self.context or pages < self.pages:
            raise self._other("memory", f"room for {self.pages} pages", f"{pages} pages")

    def _other(self, what: str, expected: Any, got: Any) -> UserError:
        return UserError(
            f"this bundle was made for another {what}",
            op="LLM",
            expected=expected,
            got=got,
            hint=f"make one for it: tilegrad compile ... (this is {self.folder})",
        )


def open_bundled(path: str | os.PathLike[str]) -> Bundled | None:
    """The Bundle of an LLM at a path, which serves this process from now on; None where it is
    something else."""
    if not is_bundle(path):
        return None
    bundle = load_bundle(path).bundle
    found = bundle.manifest.get("llm")
    if found is None or bundle.model is None:
        raise UserError("this bundle is of no language model", op="LLM", got=str(path))
    if bundle.device == HOST:
        bundle.read_ahead()
    limits = Limits(found["page"], found["chunk"])
    sizes = (found["context"], found["requests"], found["pages"])
    kept = found.get("kv_cache_dtype", found["dtype"]), found.get("kv_cache_scales")
    made = (str(path), bundle.model, bundle.device, found["dtype"], *sizes, limits, *kept)
    return Bundled(*made, guesses=found.get("guesses", 0))


def save_llm(
    path: str | os.PathLike[str],
    name: str | os.PathLike[str],
    *,
    context: int | None = None,
    requests: int = 4,
    dtype: Any = None,
    kv_cache_dtype: str = "auto",
    guesses: int = 0,
    target: str | None = None,
    progress: Tell | None = None,
) -> str:
    """Make a Bundle of a model for this machine's CPU, or for a Target; its path.

    With `guesses` it has steps that verify so many of a request, too (`speculate="ngram"`). Steps
    are traced on this machine's CPU, with the Target's pages, chunks, ranges of Symbols and dtype,
    and compiled for the Target.
    """
    from .llm import LLM

    check_folder(path)
    wanted = None if target is None else target_named(target)
    if dtype is None and wanted is not None and wanted.has_threads:
        dtype = dtype_for(open_model(name, lambda _: None).tensors, wanted.name)
    settings: dict[str, Any] = {"context": context, "requests": requests, "dtype": dtype}
    settings["kv_cache_dtype"] = kv_cache_dtype
    if guesses:
        settings |= {"speculate": "ngram", "guesses": guesses}
    with record(wanted) as recorder:
        llm = LLM(name, device=HOST, progress=progress, **settings)
        llm.engine.prepare(progress, VARIANTS)
        prompt = llm._ids(PROMPT) if len(llm.tokenizer) else [1, 2, 3]
        llm.generate(prompt[: max(1, llm.context // 2)], max_tokens=3)
        _score(llm.engine)
    limits = limits_of(wanted or llm.device)
    facts = {
        "context": llm.context,
        "requests": requests,
        "pages": llm.engine.pool.pages,
        "page": limits.page,
        "chunk": limits.chunk,
        "dtype": str(llm.dtype),
        "kv_cache_dtype": llm.kv_cache_dtype,
        "guesses": guesses,
    }
    if llm.engine.cache.scales:
        facts["kv_cache_scales"] = [one.tolist() for one in llm.engine.cache.scales]
    copy = _copier(Path(llm.path))
    return save_bundle(path, recorder, target=wanted, files=copy, llm=facts)


def _score(engine: Engine) -> None:
    """Score prompts with each of the steps that do it: with and without the likeliest tokens, one
    of each range of lengths."""
    for shown in (0, MOST_LOGPROBS):
        count = 1
        while count <= min(SCORED, engine.context - 1):
            scoring = engine.scoring([1] * (count + 1), shown)
            while scoring is not None and not scoring.step():
                pass
            count = engine.steps.scored_alike(count)[1] + 1


def _copier(source: Path) -> Callable[[Path], str]:
    """What puts a model's files into a Bundle's folder, and names the model there."""

    def copy(folder: Path) -> str:
        target = folder / MODEL / source.name
        if (folder / MODEL).exists():
            shutil.rmtree(folder / MODEL)
        target.parent.mkdir(parents=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
        return source.name

    return copy


__all__ = ["Bundled", "open_bundled", "save_llm"]
