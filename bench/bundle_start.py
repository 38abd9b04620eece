"""From the start of a process to the first token of a bundled model, where there is no compiler.

    python bench/bundle_start.py                       makes an environment without llvmlite (pip)
    python bench/bundle_start.py --python ENV/bin/python     takes one that is there

A bundle of a model is made here; then `tilegrad run` answers a prompt from it in the other
environment, several times, and the clock stops when the first bytes of the answer arrive. The
answer must be the one that the model gives here without a bundle. CPUs in use by others make it
slower: the best of the runs counts. The exit status is 1 where the bar is missed or answers differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measure

BAR = 1.0  # seconds, best of the runs
PACKAGES = ("numpy", "ml_dtypes", "safetensors", "tokenizers", "jinja2", "typer", "rich")
COMMAND = "from tilegrad.cli.main import main; main()"
SOURCE = Path(__file__).resolve().parents[1] / "src"


def environment(folder: Path) -> str:
    """The Python of a new environment that has what a bundle needs, and no llvmlite."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return str(python)


def answer(python: str, words: list[str], variables: dict[str, str]) -> tuple[float, str]:
    """Seconds to the first bytes of an answer, and all of it."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [python, "-c", COMMAND, "run", *words],
        stdout=subprocess.PIPE,
        env={**os.environ, **variables},
    )
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 4096)
    seconds = time.perf_counter() - began
    text = (first + process.stdout.read()).decode()
    if process.wait():
        sys.exit(f"tilegrad run ended with status {process.returncode}")
    return seconds, text


def main() -> None:
    """Measure, compare and say so."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--bundle", default="", help="A bundle that is there already.")
    parser.add_argument("--python", default="", help="A Python that has no llvmlite.")
    parser.add_argument("--prompt", default="What is the capital of France?")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", default="", help="a JSON file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        python = options.python or environment(Path(folder) / "env")
        has_llvm = subprocess.run([python, "-c", "import llvmlite"], capture_output=True)
        if has_llvm.returncode == 0:
            sys.exit(f"{python} has llvmlite")
        here = {"PYTHONPATH": str(SOURCE)}
        bundle = options.bundle or str(Path(folder) / "bundle")
        if not options.bundle:
            words = ["compile", options.model, "--out", bundle, "--requests", "1"]
            words += ["--context", "2048"]
            subprocess.run(
                [sys.executable, "-c", COMMAND, *words], check=True, env={**os.environ, **here}
            )
        # As installed: bytecode is kept, and there is no cache of compiled programs to be had.
        there = {
            **here,
            "TILEGRAD_CACHE": "",
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(Path(folder) / "bytecode"),
        }
        _, expected = answer(sys.executable, [options.model, options.prompt], here)
        answer(python, [bundle, options.prompt], there)  # writes the bytecode
        found = [answer(python, [bundle, options.prompt], there) for _ in range(options.runs)]
    equal = all(text == expected for _, text in found)
    seconds = sorted(s for s, _ in found)
    met = seconds[0] <= BAR
    print(f"answer: {expected.strip()!r}; equal {len(found)} times: {'yes' if equal else 'NO'}")
    print(
        f"first token after {seconds[0]:.2f} s, best of {len(found)} "
        f"(all: {', '.join(f'{s:.2f}' for s in seconds)}); bar {BAR:.0f} s: "
        f"{'met' if met else 'MISSED'}"
    )
    if options.out:
        record = measure.facts(kind="bundle start", model=options.model, prompt=options.prompt)
        record |= {"seconds": seconds, "bar": BAR, "met": met, "equal": equal}
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(0 if met and equal else 1)


if __name__ == "__main__":
    main()
