"""The level `invariant` with a real model: every stream equal to its solo run, and what that costs.

    python bench/invariant.py streams              64 streams of mixed lengths against solo runs
    python bench/invariant.py streams --minutes 10 the same until the time is over
    python bench/invariant.py cost                 decode and prefill beside `reproducible`

Both write bench/results/invariant-<what>-<date>.json. A stream is a list of tokens, their logprobs
and those of the likeliest three, compared as bits. Streams come a few at each step, so that their
prompts are cut into chunks beside those that decode, and buckets change all the time. `cost` counts
CPU seconds of one thread, which other programs of the machine do not lengthen much, and takes the
levels in turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tilegrad as tg
from tilegrad.generate.engine import Engine
from tilegrad.generate.llm import LLM
from tilegrad.generate.request import Produced, Request
from tilegrad.generate.sampling import Sampling

LEVELS = ("reproducible", "invariant")
TEXT = Path(__file__).resolve().parents[1] / "README.md"
LENGTHS = (3, 9, 17, 33, 48, 65, 90, 120, 150, 200)  # tokens of prompts
Stream = list[tuple[int, float, tuple[tuple[int, float], ...]]]


def requests_of(llm: LLM, count: int, tokens: int) -> list[Request]:
    """As many requests, of few prompts: every third draws, each prompt with one seed."""
    ids = [int(t) for t in llm.tokenizer.encode(TEXT.read_text())]
    found = []
    for number in range(count):
        kind = number % len(LENGTHS)
        drawn = {"temperature": 0.8, "top_p": 0.95, "seed": kind} if kind % 3 == 0 else {}
        given = tuple(ids[100 * kind : 100 * kind + LENGTHS[kind]])
        found.append(
            Request((number, kind), given, Sampling(logprobs=3, **drawn), max_tokens=tokens)
        )
    return found


def run(engine: Engine, waiting: list[Request], first: int, more: int) -> dict[Any, Stream]:
    """All of them: `first` at once, then `more` at each step."""
    made: dict[Any, list[Produced]] = {}
    waiting = list(waiting)
    room = first
    while waiting or engine.busy:
        for request in waiting[:room]:
            engine.add(request)
        waiting, room = waiting[room:], more
        for produced in engine.step():
            made.setdefault(produced.id, []).append(produced)
    return {id: [(p.token, p.logprob, p.top) for p in found] for id, found in made.items()}  # type: ignore[misc]


def apart(one: Stream, other: Stream) -> float:
    """The largest difference of logprobs, as far as tokens agree."""
    most = 0.0
    for (token, logprob, _), (other_token, other_logprob, _) in zip(one, other):
        if token != other_token:
            break
        most = max(most, abs(logprob - other_logprob))
    return most


def streams(given: argparse.Namespace) -> dict[str, Any]:
    """Streams beside one another against each of them alone, at both levels."""
    rows = []
    for level in given.levels.split(","):
        llm = LLM(given.model, requests=given.streams, context=512, determinism=level)
        asked = requests_of(llm, given.streams, given.tokens)
        alone = {r.id[1]: run(llm.engine, [r], 1, 1)[r.id] for r in asked[: len(LENGTHS)]}  # type: ignore[index]
        begin, rounds, equal, total, most = time.time(), 0, 0, 0, 0.0
        while not rounds or time.time() - begin < 60 * given.minutes:
            turned = asked[rounds % len(asked) :] + asked[: rounds % len(asked)]
            found = run(llm.engine, turned, 1 + rounds % 7, 1 + rounds % 5)
            for (_, kind), stream in found.items():
                total += 1
                equal += stream == alone[kind]
                most = max(most, apart(stream, alone[kind]))
            rounds += 1
        row = {
            "level": level,
            "streams": total,
            "equal": equal,
            "most_apart": most,
            "rounds": rounds,
            "seconds": round(time.time() - begin, 1),
            "tokens": total * given.tokens,
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return {"kind": "streams", "at_once": given.streams, "rows": rows}


def timed(engine: Engine, prompt: tuple[int, ...], rows: int, tokens: int) -> tuple[float, float]:
    """CPU seconds of a prompt's token, and of a step of so many rows."""
    for number in range(rows):
        engine.add(Request(number, prompt, max_tokens=tokens))
    begin = time.process_time()
    while any(r.left for r in engine.running.values()) or not engine.running:
        engine.step()
    filled = time.process_time()
    steps = 0
    while len(engine.running) == rows:
        engine.step()
        steps += 1
    done = time.process_time()
    while engine.busy:
        engine.step()
    return (filled - begin) / (rows * len(prompt)), (done - filled) / max(1, steps)


def cost(given: argparse.Namespace) -> dict[str, Any]:
    """Decode and prefill at both levels, in turns."""
    tg.configure(threads=1)
    made = {x: LLM(given.model, requests=8, context=512, determinism=x) for x in LEVELS}
    ids = [int(t) for t in made[LEVELS[0]].tokenizer.encode(TEXT.read_text())]
    measured: dict[tuple[str, str], list[float]] = {}
    for turn in range(given.turns + 1):  # the first compiles
        for level, llm in made.items():
            for rows in (1, 8):
                length = 400 if rows == 1 else 16
                each, step = timed(llm.engine, tuple(ids[:length]), rows, given.tokens)
                if turn:
                    measured.setdefault((f"decode of {rows}", level), []).append(step)
                    if rows == 1:
                        measured.setdefault(("a prompt of 400", level), []).append(each * length)
        print(turn, flush=True)
    rows = []
    for what in dict.fromkeys(name for name, _ in measured):
        seconds = {level: statistics.median(measured[what, level]) for level in LEVELS}
        best = {level: min(measured[what, level]) for level in LEVELS}
        rows.append(
            {
                "what": what,
                **{f"{level}_ms": round(1e3 * s, 2) for level, s in seconds.items()},
                **{f"{level}_least_ms": round(1e3 * s, 2) for level, s in best.items()},
                "ratio": round(seconds["invariant"] / seconds["reproducible"], 3),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return {"kind": "cost", "turns": given.turns, "threads": 1, "rows": rows}


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("streams", "cost"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--levels", default=",".join(LEVELS))
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    record = (streams if given.what == "streams" else cost)(given)
    day = datetime.now(UTC).date().isoformat()
    place = Path(__file__).parent / "results" / f"invariant-{given.what}-{day}.json"
    about = {"date": day, "model": given.model, "machine": platform.machine()}
    place.write_text(json.dumps({**about, **record}, indent=1) + "\n")
    print(place)


if __name__ == "__main__":
    main()
