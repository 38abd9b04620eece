"""What do recipes of quantisation cost? Perplexity of a model in each, from a fair source.

    python bench/recipes.py                 smollm2, writes bench/results/recipes-...json
    python bench/recipes.py --only gptq     rows with a word in their names; others as found
    python bench/recipes.py --quick         a tiny model, seconds, no file: to see that it runs
    python bench/recipes.py --window 2048 --rate 1e-3 --most 1000 --device cuda      on a GPU

SmolLM2 comes in Q4_1, so its weights lie on a grid of 4 bits and prove nothing. They are unpacked
and trained by our own loop on the first half of the Shakespeare that training ships, until they
have moved by half a step of Q4_1 (root mean square); then the rate falls to nothing. That half has
60,000 tokens: gradients that move weights so far teach the model to know them by heart (loss 0.06
there, 7.0 on the last quarter). So most of the way is noise: every second step adds a little to
each matrix, in units of its steps, and training makes up for it. It learns the next tokens and, as
much, the chances that the model gave before, so that it forgets nothing else. What noise did to
results is undone, the rest stays: weights are elsewhere, and the model is about as good as it was
("as it came" in the table). Recipes look at rows of the third quarter, by which the sizes of this
training were chosen too, and are judged on rows of the last. What was trained and measured is
kept in a folder (--work), in a part of its own for each model and its sizes, so that a run that was
stopped goes on. On a busy CPU, OPENBLAS_NUM_THREADS=1 makes GPTQ much faster.

A row's share is its loss of log perplexity over that of plain rounding to as many bits. The
divergence from the chances that the unrounded model gives says the same with less noise. Long
because the source, each row and how it is judged stand on one page.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import measure
import numpy as np
from verdict import end, verdict

import tilegrad as tg
from tilegrad import nn
from tilegrad.core.config import config as settings
from tilegrad.core.dtype import bfloat16, float32
from tilegrad.core.format import format_of
from tilegrad.exchange.compressed_write import write_safetensors
from tilegrad.exchange.fetch import open_model
from tilegrad.exchange.safetensors import read_safetensors
from tilegrad.generate.load import Weights, config_of, tokenizer_of
from tilegrad.generate.quantise import SHORTER
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.models.decoder.quantise import quantise_decoder
from tilegrad.nn import init
from tilegrad.quant import qat
from tilegrad.quant.layerwise import WORD, Recipe, Rounding
from tilegrad.train.demo import read_text
from tilegrad.train.loop import train
from tilegrad.train.optimizer import AdamW

Array = np.ndarray[Any, Any]
BLOCK, WANTED = 32, 0.5  # of Q4_1, and how many of its steps weights have to move
BEYOND = 1.05  # times that, as weights may go back a little while the rate falls
EVERY = 2  # steps from noise to noise

PLAIN = {3: "int3", 4: "int4", 8: "plain-int8"}  # what shares are shares of
SHARES = {"gptq-int4": 0.5, "awq-int4": 0.75, "int8": 0.75}  # at most
FP8_RATIO = 1.04  # of perplexity, at most
WORDS = ("int4", "gptq-int4", "awq-int4", "fp8", "plain-int8", "int8", "searched-int4")
WORDS += ("int3", "gptq-int3", "awq-gptq-int4", "2:4", "magnitude-2:4")
FORMATS = ("Q8_0", "Q4_K", "Q4_0", "MXFP4", "E2M1_G16_E4M3_TOTAL", "NF4_G64_F32")
CAME = "as it came"
LONGER, TRAINED = "trained on, then gptq-int3", "trained on in int3 (QAT)"


@dataclass(frozen=True)
class Sizes:
    """How much is trained, looked at and judged."""

    window: int = 512  # tokens of a training step
    warm: int = 5  # steps until the rate is at its peak
    rate: float = 2e-4
    noise: float = 0.1  # steps of Q4_1 that weights are moved by at random, every few steps
    most: int = 200  # steps at the peak, at most
    settle: int = 40  # steps in which the rate falls to nothing, without noise
    later: int = 40  # steps of QAT, and of training without it
    later_rate: float = 2e-4
    length: int = 256  # of rows that recipes look at and are judged by
    samples: int = 16
    judged: int = 48
    group: int = 64


# ---- the source -------------------------------------------------------------------------------


def loss(model: Any, tokens: Any, following: Any) -> Any:
    """Cross-entropy of the next tokens."""
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), following.reshape(-1))


def narrow(model: Any, tokens: Any) -> Any:
    """Logits computed in bfloat16, of weights that stay in float32."""
    given = {n: p.to(bfloat16) for n, p in model.named_parameters(remove_duplicate=False)}
    return nn.functional_call(model, given, tokens).to(float32)


def loss_and_before(model: Any, tokens: Any, following: Any, before: Any) -> Any:
    """Cross-entropy with the next tokens, and with the chances that a model gave before (logits):
    the mean of both."""
    logits = narrow(model, tokens).reshape(-1, before.shape[-1])
    chances = nn.functional.softmax(before.reshape(-1, before.shape[-1]), -1)
    both = [nn.functional.cross_entropy(logits, to) for to in (following.reshape(-1), chances)]
    return (both[0] + both[1]) / 2


def with_chances(batches: Iterable[Any], before: Decoder) -> Iterator[tuple[Any, ...]]:
    """Windows with the logits that a model gives for them."""
    logits = tg.jit(narrow)
    for tokens, following in batches:
        with tg.no_grad():
            found = logits(before, tokens)
        yield tokens, following, found


def windows(tokens: Array, length: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Windows of a text, each with the same moved on by one."""
    random = np.random.default_rng(seed)
    while True:
        first = int(random.integers(0, len(tokens) - length - 1))
        part = tokens[first : first + length + 1][None]
        yield tg.tensor(part[:, :-1]), tg.tensor(part[:, 1:])


def weights_of(model: Decoder) -> dict[str, Array]:
    """The values of a model's Parameters, by name."""
    return {name: np.array(p.to(float32).numpy()) for name, p in model.named_parameters()}


def trained(model: Decoder) -> list[Any]:
    """What is trained: the blocks; embedding, head and last norm stay."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("blocks.")
    return [p for p in model.parameters() if p.requires_grad]


class Movement:
    """How far the matrices of blocks are from where they were, in steps of Q4_1; all of it stays
    on the model's device."""

    def __init__(self, model: Decoder) -> None:
        named = model.named_parameters()
        self.weights = [p for n, p in named if n.startswith("blocks.") and len(p.shape) == 2]
        self.before = [tg.tensor(w.numpy(), device=w.device) for w in self.weights]
        cut = [w.numpy().reshape(len(w), -1, BLOCK) for w in self.weights]
        steps = [np.maximum(np.ptp(w, axis=-1, keepdims=True), 1e-6) / 15 for w in cut]
        self.steps = [tg.tensor(s, device=w.device) for s, w in zip(steps, self.weights)]
        self.count = sum(w.numel() for w in self.weights)

    def now(self) -> float:
        """The root of the mean square over all weights."""
        with tg.no_grad():
            return math.sqrt(float(squares(self.weights, self.before, self.steps)) / self.count)

    def add_noise(self, share: float) -> None:
        """Move every weight at random, by that share of a step (root mean square)."""
        with tg.no_grad():
            moved_at_random(self.weights, self.steps, tg.tensor(np.float32(share)))


@tg.jit
def squares(weights: list[Any], before: list[Any], steps: list[Any]) -> Any:
    """The sum of squares of what weights moved, in steps."""
    total: Any = 0.0
    for weight, old, step in zip(weights, before, steps):
        total = total + (((weight - old).reshape(*step.shape[:2], BLOCK) / step) ** 2).sum()
    return total


@tg.jit
def moved_at_random(weights: list[Any], steps: list[Any], share: Any) -> None:
    """Add Gaussian noise in units of steps to weights."""
    for weight, step in zip(weights, steps):
        noise = tg.randn(*step.shape[:2], BLOCK, device=weight.device) * (step * share)
        weight.assign(weight + noise.reshape(weight.shape))


def fine_tune(
    model: Decoder, before: Decoder, tokens: Array, sizes: Sizes, say: Any
) -> dict[str, Any]:
    """Train until weights have moved by half a step; what was done."""
    tg.manual_seed(3)
    movement = Movement(model)
    optimizer = AdamW(
        trained(model), lr=sizes.rate / sizes.warm, betas=(0.9, 0.95), weight_decay=0.0
    )
    found: dict[str, Any] = {"losses": [], "moved": 0.0, "noises": 0, "at_peak": sizes.most}

    def left(step: int) -> float:
        """The share of the rate that is left."""
        return max(0.0, min(1.0, 1 - (step - found["at_peak"]) / sizes.settle))

    def after(number: int, value: float, history: Any) -> None:
        found["losses"].append(round(value, 4))
        step = number + 1
        if step % EVERY == 0 and step < found["at_peak"]:
            movement.add_noise(sizes.noise)
            found["noises"] += 1
            found["moved"] = movement.now()
            if found["moved"] >= BEYOND * WANTED:
                found["at_peak"] = step
        optimizer.lr = sizes.rate * min(1.0, (step + 1) / sizes.warm, left(step))
        say(f"training: step {step}, loss {value:.3f}, moved {found['moved']:.3f}")

    begun = time.perf_counter()
    batches = with_chances(windows(tokens, sizes.window, 0), before)
    going = itertools.takewhile(lambda _: left(len(found["losses"])) > 0, batches)
    train(model, optimizer, going, loss_and_before, clip=1.0, on_step=after)
    found["moved"] = movement.now()
    found["seconds"] = round(time.perf_counter() - begun, 1)
    return found


def train_on(model: Decoder, tokens: Array, sizes: Sizes, say: Any) -> None:
    """Some steps more, at a rate that falls to nothing."""
    optimizer = AdamW(trained(model), lr=sizes.later_rate, weight_decay=0.0)

    def after(number: int, value: float, history: Any) -> None:
        optimizer.lr = sizes.later_rate * (1 - (number + 1) / sizes.later)
        say(f"training on: step {number + 1}, loss {value:.3f}")

    batches = windows(tokens, sizes.window, 1)
    train(model, optimizer, batches, loss, clip=1.0, steps=sizes.later, on_step=after)


class Source:
    """The model that is rounded, its text in parts, and the folder where results are kept."""

    device: str | None = None

    def __init__(self, config: Any, start: Any, tokens: Array, sizes: Sizes, work: Path) -> None:
        self.config, self.start, self.sizes, self.work = config, start, sizes, work
        half, quarter = len(tokens) // 2, 3 * len(tokens) // 4
        self.text = tokens[:half]
        self.seen = _rows(tokens[half:quarter], sizes.length, sizes.samples)
        self.judged = _rows(tokens[quarter:], sizes.length, sizes.judged)
        work.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Where a set of weights is kept."""
        return self.work / f"{name}.safetensors"

    def new(self) -> Decoder:
        """A model without values yet."""
        with init.skipped():
            made = Decoder(self.config, float32)
        return made if self.device is None else made.to(device=self.device)

    def model(self, name: str = "tuned") -> Decoder:
        """A new model with weights that were kept."""
        made = self.new().requires_grad_(False).eval()
        kept = read_safetensors(self.path(name))
        values = {n: tg.tensor(kept[n].array()) for n, _ in made.named_parameters()}
        made.load_state_dict(values, strict=False)  # a tied head is there once
        return made

    def tune(self, say: Any) -> dict[str, Any]:
        """Train what recipes round, unless that was done."""
        record = self.work / "tuned.json"
        if not record.exists():
            made, before = self.new(), self.new().requires_grad_(False).eval()
            for model in (made, before):
                self.start(model)
            found = fine_tune(made, before, self.text, self.sizes, say)
            write_safetensors(self.path("tuned"), weights_of(made))
            record.write_text(json.dumps(found))
        return dict(json.loads(record.read_text()))


def _rows(tokens: Array, length: int, count: int) -> list[Array]:
    """Rows (1, length), evenly spread over a part of a text."""
    found = tokens[: len(tokens) // length * length].reshape(-1, 1, length)
    return list(found[:: max(1, len(found) // count)][:count])


# ---- judging ------------------------------------------------------------------------------------


@tg.jit
def log_chances(model: Decoder, tokens: Any) -> Any:
    """Log of the chances (tokens - 1, V) of what follows each token of a row."""
    return nn.functional.log_softmax(model(tokens).to(float32)[0, :-1], -1)


def judge(model: Decoder, source: Source, first: bool = False) -> dict[str, Any]:
    """Perplexity on the judged rows, and the divergence from the unrounded model's chances; the
    first model that is judged is that one."""
    total, away, count = 0.0, 0.0, 0
    for at, tokens in enumerate(source.judged):
        kept = source.work / f"chances-{at}.npy"
        with tg.no_grad():
            logs = log_chances(model, tg.tensor(tokens)).numpy()
        total -= float(np.take_along_axis(logs, tokens[0, 1:, None], -1).sum(dtype=np.float64))
        count += len(logs)
        if first:
            np.save(kept, logs)
        else:
            exact = np.load(kept)
            away += float((np.exp(exact) * (exact - logs)).sum(dtype=np.float64))
    row: dict[str, Any] = {"log_perplexity": total / count, "tokens": count}
    return row if first else {**row, "divergence": away / count}


def with_values(model: Decoder, number: int, layers: list[Rounding]) -> int:
    """Let a block compute with the values of its rounded layers; their bits."""
    for one in layers:
        layer = model.blocks[number].get_submodule(one.name)
        layer.weight.node = tg.tensor(one.format.to_float32(one.raw)).node
    return sum(8 * one.bytes for one in layers)


def by_recipe(source: Source, word: str, name: str = "tuned", say: Any = None) -> Any:
    """A model whose blocks a recipe rounded, and bits of a weight."""
    model, bits, count = source.model(name), 0, 0
    kept: dict[str, Array] = {}
    recipe = Recipe(word, source.sizes.group)
    seen = source.seen if recipe.needs_samples else []
    for number, layers in quantise_decoder(model, recipe, seen):
        bits += with_values(model, number, layers)
        count += sum(math.prod(one.shape) for one in layers)
        say(f"{word}: block {number + 1} of {len(model.blocks)}")
        for one in layers if word == "gptq-int3" and name == "tuned" else ():
            kept |= {f"{number}.{one.name}.raw": one.raw, f"{number}.{one.name}.before": one.before}
    if kept:
        write_safetensors(source.path(word), kept)
    return model, bits / count


def by_format(source: Source, name: str) -> Any:
    """A model whose blocks are stored in a Format; rows that are no whole blocks take shorter."""
    model, bits, count = source.model(), 0, 0
    for where, parameter in model.blocks.named_parameters():
        if len(parameter.shape) != 2:
            continue
        form, weight = format_of(name), parameter.numpy()
        if weight.shape[1] % form.block:
            form = format_of(SHORTER.get(form.name, form.name))
        raw = form.pack(weight)
        bits, count = bits + 8 * raw.nbytes, count + weight.size
        model.blocks.get_submodule(where[:-7]).weight.node = tg.tensor(form.to_float32(raw)).node
    return model, bits / count


def by_training(source: Source, say: Any) -> Any:
    """A model trained on with its weights rounded, from where GPTQ begins."""
    if not source.path("gptq-int3").exists():
        by_recipe(source, "gptq-int3", say=say)
    kept, model = read_safetensors(source.path("gptq-int3")), source.model()
    form, start = format_of(f"INT3_G{source.sizes.group}_F16_ZERO"), {}
    for name, layer in model.blocks.named_modules():
        if isinstance(layer, nn.Linear):
            raw, before = (kept[f"{name}.{part}"].array() for part in ("raw", "before"))
            shape = (layer.out_features, layer.in_features)
            start[f"blocks.{name}"] = Rounding(f"blocks.{name}", form, raw, shape, 0.0, before)
    qat.prepare(
        model, "int3", source.sizes.group, skip=lambda n: not n.startswith("blocks."), start=start
    )
    train_on(model, source.text, source.sizes, say)
    made = qat.convert(model.eval())
    for one in made:
        model.get_submodule(one.name).weight.node = tg.tensor(one.format.to_float32(one.raw)).node
    return model, sum(8 * m.bytes for m in made) / sum(math.prod(m.shape) for m in made)


def trained_longer(source: Source, say: Any) -> Any:
    """A model trained on as long without rounding, then rounded by GPTQ."""
    if not source.path("longer").exists():
        model = source.model().train()
        train_on(model, source.text, source.sizes, say)
        write_safetensors(source.path("longer"), weights_of(model))
    return by_recipe(source, "gptq-int3", "longer", say)


# ---- running ------------------------------------------------------------------------------------


def as_it_came(source: Source) -> Any:
    """The model before it was trained."""
    model = source.new().requires_grad_(False).eval()
    source.start(model)
    return model, 32.0


def rows_of(source: Source, say: Any) -> dict[str, Callable[[], Any]]:
    """What makes each row's model and says its bits."""
    found: dict[str, Callable[[], Any]] = {"none": lambda: (source.model(), 32.0)}
    found[CAME] = lambda: as_it_came(source)
    found |= {w: functools.partial(by_recipe, source, w, say=say) for w in WORDS}
    found |= {
        LONGER: lambda: trained_longer(source, say),
        TRAINED: lambda: by_training(source, say),
    }
    return found | {name: functools.partial(by_format, source, name) for name in FORMATS}


def measured(source: Source, only: str, say: Any) -> dict[str, dict[str, Any]]:
    """All rows that were measured, now or before; those to come are the one named `only`, or have
    it in their names."""
    path = source.work / "rows.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    rows = rows_of(source, say)
    for name, make in rows.items():
        asked = name == only if only in rows else only in name
        if name in found or (name != "none" and not asked):
            continue
        begun = time.perf_counter()
        model, bits = make()
        found[name] = {**judge(model, source, name == "none"), "bits": round(bits, 3)}
        found[name]["seconds"] = round(time.perf_counter() - begun, 1)
        path.write_text(json.dumps(found, indent=1))
        say(f"{name}: {found[name]}")
    return found


def verdicts(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows with their perplexity, shares and bars, as far as what they need was measured."""
    start = rows["none"]["log_perplexity"]
    found = {}
    for name, row in rows.items():
        lost = row["log_perplexity"] - start
        made = {**row, "perplexity": math.exp(row["log_perplexity"]), "lost": lost}
        word = WORD.match(name)
        plain = rows.get(PLAIN.get(Recipe(name).bits, "")) if word else None  # of 2:4 none
        if plain is not None and name != "fp8" and plain is not row:
            made["share"] = lost / (plain["log_perplexity"] - start)
            made["divergence_share"] = row["divergence"] / plain["divergence"]
        if name in SHARES and "share" in made:
            made |= {"bar": f"share <= {SHARES[name]}", "met": made["share"] <= SHARES[name]}
        if name == "fp8":
            made |= {"bar": f"perplexity <= {FP8_RATIO}x", "met": math.exp(lost) <= FP8_RATIO}
        if name == TRAINED and LONGER in rows:
            made["bar"] = f"below '{LONGER}'"
            made["met"] = row["log_perplexity"] < rows[LONGER]["log_perplexity"]
        found[name] = made
    return found


def kept_in(work: Path, model: str, sizes: Sizes) -> Path:
    """The folder of one model and its sizes: others have others' results."""
    text = json.dumps([model, vars(sizes)], sort_keys=True)
    return work / hashlib.sha256(text.encode()).hexdigest()[:16]


def smollm2(sizes: Sizes, work: Path, model: str = "smollm2") -> Source:
    """A model's files and the text that training ships."""
    files = open_model(model, lambda _: None)
    tokens = np.array(tokenizer_of(files).encode(read_text()))

    def start(made: Decoder) -> None:
        made.load(Weights(files.tensors, float32, lambda *_: None))

    return Source(config_of(files), start, tokens, sizes, kept_in(work, model, sizes))


TINY = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def tiny(work: Path, **more: Any) -> Source:
    """A tiny random decoder over letters."""
    sizes = Sizes(
        window=32,
        warm=2,
        most=more.pop("most", 40),
        settle=8,
        later=8,
        length=32,
        samples=4,
        judged=4,
        group=32,
        **more,
    )
    tokens = np.minimum(np.frombuffer(read_text()[:40_000].encode(), np.uint8), 127).astype(
        np.int64
    )

    def start(made: Decoder) -> None:
        draw = np.random.default_rng(0)
        for parameter in made.parameters():
            shape = tuple(parameter.shape)
            value = draw.standard_normal(shape) * 0.1 if len(shape) == 2 else np.ones(shape)
            parameter.assign(tg.tensor(value.astype(np.float32)))

    return Source(DecoderConfig.from_huggingface(TINY), start, tokens, sizes, work)


def main() -> None:
    """Train, round, judge, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument(
        "--only", default="", help="the row of this name, or rows whose names have this word"
    )
    parser.add_argument("--work", type=Path, help="folder of what was trained and measured")
    parser.add_argument("--device", help="where everything runs")
    parser.add_argument("--quick", action="store_true", help="a tiny model, no file")
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default))
    told = parser.parse_args()
    if told.device:
        tg.set_default_device(told.device)
    say = functools.partial(print, flush=True)
    given = {f.name: getattr(told, f.name) for f in fields(Sizes)}
    sizes = Sizes(**{name: value for name, value in given.items() if value is not None})
    with tempfile.TemporaryDirectory() as folder:
        if told.quick:
            source = tiny(Path(folder))
        else:
            source = smollm2(
                sizes, told.work or Path(settings().cache_folder) / "recipes", told.model
            )
        source.device = told.device
        tuned = source.tune(say)
        rows = verdicts(measured(source, told.only, say))
    for name, row in rows.items():
        share = f"share {row['share']:.3f}" if "share" in row else ""
        met = verdict(row["met"]) if "met" in row else ""
        numbers = f"{row['bits']:6.3f} {row['perplexity']:9.3f} {row['lost']:+.5f}"
        say(f"{name:28} {numbers} {share} {met}")
    if not told.quick:
        record = measure.facts(
            kind="recipes", model=told.model, sizes=vars(source.sizes), tuned=tuned, rows=rows
        )
        say(f"written: {measure.save('recipes', record)}")


if __name__ == "__main__":
    main()
    end()
