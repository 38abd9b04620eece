"""A language model on a CPU: SmolLM2 Q4_1 beside llama.cpp, and as bfloat16 beside transformers.

    python bench/llm_cpu.py --llama-python PYTHON   the interpreter that has llama_cpp
    python bench/llm_cpu.py --format Q8_0           a file of that format that llama.cpp wrote
    python bench/llm_cpu.py --int8                  weights and tokens rounded to int8, beside our
                                                    own Q4_1
    TILEGRAD_DOTS=int8 python bench/llm_cpu.py --format Q8_0    tokens in 8 bits, as llama.cpp has
    python bench/llm_cpu.py --bf16                  bfloat16 weights, beside torch.compile
    python bench/llm_cpu.py --only decode           cases whose name holds the word (repeatable)
    python bench/llm_cpu.py --quick                 short cases, one round, no file

Every side runs in a process of its own (bench/llm_worker.py) and rests while another is timed;
rounds alternate who goes first. llama.cpp runs with and without its flash attention, and with
weights packed anew at load (for AMX or AVX-512, as its build has them) and as they are stored; the
fastest counts, case by case. The time to the first token is that of a new process, from its start,
with a fresh cache of programs (cold) and with one that has them (warm); memory is that of a new
process at 1,024 tokens, whose programs are in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure
import numpy as np

import tilegrad
from tilegrad.core.config import config
from tilegrad.exchange.fetch import find_model
from tilegrad.exchange.gguf import GgufFile, read_gguf
from tilegrad.models.tokens.tokenizer import Tokenizer

THREADS, CONTEXT = 2, 2048
HERE = Path(__file__).resolve().parent
TEXT = Path(tilegrad.__file__).parent / "train" / "text" / "shakespeare.txt"
# what is held against it: a ratio of times at least, or a number at most
BARS = {
    "decode": 2.0,
    "decode long": 2.0,
    "prefill": 3.0,
    "resident": 160e6,
    "first warm": 2.0,
    "first cold": 15.0,
}
BF16_BARS = {"decode": 1.0, "decode long": 1.0, "prefill": 1.0}
FORMAT_BARS = {"Q4_0": {"decode": 3.5, "prefill": 5.5}, "Q8_0": {"decode": 2.0, "prefill": 4.0}}
INT8_BARS = {"prefill": 1.3}  # beside our own Q4_1
GOALS = {"decode": 3.5}


class Side:
    """A worker process and its name."""

    def __init__(self, name: str, python: str, *words: str, folder: str | None = None) -> None:
        self.name = name
        environment = os.environ | ({"TILEGRAD_CACHE": folder} if folder else {})
        command = [python, str(HERE / "llm_worker.py"), *words]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.start = self._answer()

    def ask(self, do: str, **words: Any) -> dict[str, Any]:
        """One request."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **words}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


# ---- times ------------------------------------------------------------------------------------


def timed(sides: list[Side], rounds: int, count: int, request: dict[str, Any]) -> dict[str, Any]:
    """Seconds of all sides, round by round; ours is the first side."""
    for side in sides:  # compiles, and fills caches
        side.ask(**{**request, **({"count": 4} if "count" in request else {})})
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    made: dict[str, list[int]] = {}
    calibration = measure.calibrate()
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            time.sleep(0.02)  # let the other side's threads stop spinning
            found = side.ask(**turned(request, number + 1))
            times[side.name].append(found["seconds"])
            made[side.name] = found["tokens"]
    calibration = max(calibration, measure.calibrate())
    medians = {name: statistics.median(values) for name, values in times.items()}
    peer = min((side.name for side in sides[1:]), key=lambda name: medians[name])
    ratios = sorted(b / a for a, b in zip(times["ours"], times[peer]))
    return {
        "peer": peer,
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[0],
        "ratio_high": ratios[-1],
        "tokens_per_second": {n: count / s for n, s in medians.items()},
        "seconds": times,
        "same_tokens": same(made["ours"], made[peer]),
        "rounds": rounds,
        "calibration": calibration,
        "void": measure.busy(calibration),
    }


def turned(request: dict[str, Any], number: int) -> dict[str, Any]:
    """The request of a round: prompts begin with other tokens each time, so that no side knows
    their keys and values from the round before."""
    tokens = request["tokens"]
    return {**request, "tokens": tokens[number:] + tokens[:number]}


def same(ours: list[int], theirs: list[int]) -> int:
    """How many tokens agree before the first that does not."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), len(ours))


def first_token(model: Path, repeats: int) -> dict[str, dict[str, Any]]:
    """Seconds from the start of a process to the first token of an answer, cold and warm."""
    command = [
        sys.executable,
        str(HERE / "llm_worker.py"),
        "first",
        str(model),
        str(THREADS),
        str(CONTEXT),
    ]
    seconds, calibration = [], measure.calibrate()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(1 + repeats):
            start = time.perf_counter()
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"TILEGRAD_CACHE": folder},
            )
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds.append(time.perf_counter() - start)
            process.communicate()
            if not line:
                raise RuntimeError(f"ended with {process.returncode} before a token came")
    warm = {"seconds": statistics.median(seconds[1:]), "all": seconds[1:]}
    both = {"calibration": calibration, "void": measure.busy(calibration)}
    return {"first cold": {"seconds": seconds[0], **both}, "first warm": {**warm, **both}}


def memory(
    sides: list[tuple[str, ...]], model: Path, tokens: list[int], made: int
) -> dict[str, Any]:
    """What new processes hold once `tokens` and `made` more are in their caches."""
    found: dict[str, Any] = {"file": sum_of_sizes(model), "tokens": len(tokens) + made}
    with tempfile.TemporaryDirectory() as folder:
        compiling = ("ours, compiling", *sides[0][1:])  # the same process before there is a cache
        for name, python, *words in (compiling, *sides):
            side = Side(name, python, *words, folder=folder)
            side.ask("decode", tokens=tokens, count=made - 1)
            found[name] = side.ask("memory")
            side.close()
    found["over_file"] = found["ours"]["resident"] - found["file"]
    found["peak_over_file"] = found["ours"]["peak"] - found["file"]
    return found


def sum_of_sizes(model: Path) -> int:
    """Bytes of a file, or of the weights of a folder."""
    files = model.glob("*.safetensors") if model.is_dir() else [model]
    return sum(f.stat().st_size for f in files)


# ---- the same model as bfloat16 -----------------------------------------------------------------

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_folder(file: GgufFile, folder: Path) -> None:
    """A GGUF file of a Llama as a Hugging Face folder of bfloat16 weights."""
    from ml_dtypes import bfloat16
    from safetensors.numpy import save_file

    said = {k.removeprefix("llama."): v for k, v in file.metadata.items()}
    heads, key_heads = said["attention.head_count"], said["attention.head_count_kv"]
    found = {}
    for name, stored in file.tensors.items():
        parts = name.removesuffix(".weight").split(".")
        path = (
            f"model.layers.{parts[1]}.{NAMES[parts[2]]}" if parts[0] == "blk" else WHOLE[parts[0]]
        )
        array = stored.values()
        if parts[-1] in ("attn_q", "attn_k"):  # pairs of features are neighbours in these files
            count = heads if parts[-1] == "attn_q" else key_heads
            cut = array.reshape(count, array.shape[0] // count // 2, 2, -1)
            array = cut.swapaxes(1, 2).reshape(array.shape)
        found[f"{path}.weight"] = np.ascontiguousarray(array).astype(bfloat16)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": int(file.tensors["token_embd.weight"].shape[0]),
        "hidden_act": "silu",
        "hidden_size": said["embedding_length"],
        "intermediate_size": said["feed_forward_length"],
        "num_hidden_layers": said["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "max_position_embeddings": said["context_length"],
        "rms_norm_eps": said["attention.layer_norm_rms_epsilon"],
        "rope_theta": said["rope.freq_base"],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": said.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": said.get("tokenizer.ggml.eos_token_id"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(file, folder)


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """The byte-pair tokenizer of a GGUF file as a tokenizer.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    said = {k.removeprefix("tokenizer.ggml."): v for k, v in file.metadata.items()}
    words = {text: i for i, text in enumerate(said["tokens"])}
    pairs = [tuple(line.split(" ", 1)) for line in said["merges"]]
    made = Tokenizer(models.BPE(words, pairs))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    control = [text for text, kind in zip(said["tokens"], said["token_type"]) if kind == 3]
    made.add_special_tokens([AddedToken(text, special=True) for text in control])
    made.save(str(folder / "tokenizer.json"))
    template = {"chat_template": file.metadata.get("tokenizer.chat_template")}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))


# ---- running ------------------------------------------------------------------------------------


def verdict(name: str, row: dict[str, Any], bar: float) -> dict[str, Any]:
    """A row against its bar."""
    if "ratio" in row:
        row |= {"value": row["ratio"], "met": row["ratio"] >= bar}
    elif name == "resident":
        row |= {"value": row["over_file"], "met": row["over_file"] <= bar}
    else:
        row |= {"value": row["seconds"], "met": row["seconds"] <= bar}
    return row | {"bar": bar, "goal": GOALS.get(name)}


def line(name: str, row: dict[str, Any]) -> str:
    """One row for people."""
    if "failed" in row:
        return f"{name:12} FAILED {row['failed']}"
    end = ("met" if row["met"] else "MISSED") + " (void: busy machine)" * row.get("void", False)
    if "ratio" in row:
        rates = ", ".join(f"{n} {r:.1f}" for n, r in row["tokens_per_second"].items())
        goal = f", goal {row['goal']}" if row["goal"] else ""
        return (
            f"{name:12} {row['ratio']:.2f}x [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}] "
            f"of {row['peer']} (bar {row['bar']}{goal}): {end}; tok/s: {rates}; "
            f"{row['same_tokens']} tokens alike; cal {row['calibration']:.0f}"
        )
    if name == "resident":
        shown = "; ".join(
            f"{n} {v['resident'] / 1e6:.0f} MB (own {v['own'] / 1e6:.0f}, files "
            f"{v['files'] / 1e6:.0f}, peak {v['peak'] / 1e6:.0f})"
            for n, v in row.items()
            if isinstance(v, dict)
        )
        return (
            f"{name:12} file + {row['value'] / 1e6:.0f} MB (peak file + "
            f"{row['peak_over_file'] / 1e6:.0f} MB; bar file + {row['bar'] / 1e6:.0f} MB): "
            f"{end}; {shown}"
        )
    return f"{name:12} {row['value']:.2f} s (bar {row['bar']:.0f} s): {end}"


def commands(told: argparse.Namespace, model: Path) -> list[tuple[str, ...]]:
    """How each side is started, ours first."""
    rest = [str(model), str(THREADS), str(CONTEXT)]
    found: list[tuple[str, ...]] = [("ours", sys.executable, "ours", *rest)]
    if told.int8:  # rounded as it is loaded
        found = [(*found[0], "int8")]
        return [*found, ("Q4_1", sys.executable, "ours", str(find_model(told.model)), *rest[1:])]
    if told.bf16:
        return [
            *found,
            ("torch.compile", told.torch_python, "transformers", *rest, told.torch_mode),
        ]
    return [
        *found,
        ("llama.cpp", told.llama_python, "llama", *rest),
        ("llama.cpp flash", told.llama_python, "llama", *rest, "flash"),
        ("llama.cpp flash, as stored", told.llama_python, "llama", *rest, "flash stored"),
    ]


def bars_of(told: argparse.Namespace) -> dict[str, float]:
    """The cases that are run, and what is held against each."""
    if told.format:
        return FORMAT_BARS[told.format]
    return INT8_BARS if told.int8 else BF16_BARS if told.bf16 else BARS


def run(told: argparse.Namespace, model: Path, ids: list[int]) -> dict[str, Any]:
    """All cases of one model."""
    rounds, made, long = (1, 16, 200) if told.quick else (told.rounds, 128, 960)
    bars, results = bars_of(told), {}
    sides: list[Side] = []

    def wanted(name: str) -> bool:
        return name in bars and (not told.only or any(word in name for word in told.only))

    def say(name: str, row: dict[str, Any]) -> None:
        results[name] = row if "failed" in row else verdict(name, row, bars[name])
        print(line(name, results[name]), flush=True)

    cases = {
        "decode": (made, {"do": "decode", "tokens": ids[:32], "count": made}),
        "decode long": (64, {"do": "decode", "tokens": ids[:long], "count": 64}),
        "prefill": (512, {"do": "prefill", "tokens": ids[:512]}),
    }
    if wanted("first warm") or wanted("first cold"):
        for name, row in first_token(model, 1 if told.quick else 5).items():
            say(name, row)
    if wanted("resident"):
        say("resident", memory(commands(told, model), model, ids[:long], 64))
    if any(wanted(name) for name in cases):
        sides = [Side(*words) for words in commands(told, model)]
    for name, (count, request) in cases.items():
        if wanted(name):
            try:
                say(name, timed(sides, rounds, count, request))
            except RuntimeError as error:
                say(name, {"failed": str(error)})
                break
    for side in sides:
        side.close()
    return results


def model_of(told: argparse.Namespace, path: Path, file: GgufFile, folder: Path) -> Path:
    """The model that is timed: the file, or what is made of it in a folder."""
    if told.format:
        made = folder / f"{told.format}.gguf"
        words = ["quantise", str(path), told.format, str(made)]
        subprocess.run([told.llama_python, str(HERE / "llm_worker.py"), *words], check=True)
        return made
    if told.int8 or told.bf16:
        write_folder(file, folder)
        return folder
    return path


def main() -> None:
    """Run the cases, print them, write the file; exits with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--llama-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--torch-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--torch-mode", default="", help="mode of torch.compile")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--format", choices=FORMAT_BARS, default="")
    parser.add_argument("--only", action="append", default=[], help="cases whose name holds this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    told = parser.parse_args()
    path = find_model(told.model)
    file = read_gguf(path)
    ids = Tokenizer.from_gguf(file.metadata).encode(TEXT.read_text()[:8000])
    calibration = measure.settle()
    with tempfile.TemporaryDirectory() as name:
        results = run(told, model_of(told, path, file, Path(name)), ids)
    if not told.quick:
        what = told.format or "int8" * told.int8 or "bf16" * told.bf16
        rounded = "int8-tokens" * (config().dots == "int8")
        more = [w for w in (what, rounded, "partial" * bool(told.only)) if w]
        kind = "-".join(["llm-cpu", *more])
        record = measure.facts(
            kind=kind, threads=THREADS, model=path.name, results=results, calibration=calibration
        )
        print(f"written: {measure.save(kind, record)}")
    sys.exit(0 if all(row.get("met") for row in results.values()) else 1)


if __name__ == "__main__":
    main()
