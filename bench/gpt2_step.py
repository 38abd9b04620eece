"""A training step of GPT-2 124M on a GPU: ours beside torch.compile.

    python bench/gpt2_step.py --out bench/results/gpt2-step-<date>.json     B = 16 and 32
    python bench/gpt2_step.py --batches 16 --no-peer
    python bench/gpt2_step.py --check               no GPU: schedule, emit and assemble the step

Vocabulary 50,304, 1024 tokens, no dropout. Ours has float32 weights that are cast to bfloat16 where
they are used, and AdamW in float32, all in one jitted function; torch has bf16 autocast, flash
attention, fused AdamW and torch.compile. Both begin with the same weights and take the same tokens;
the first losses are compared, and ours must fall. A round times several steps of one side, then of
the other; medians of the rounds are told. At least half of torch's tokens a second is the bar.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from verdict import end, verdict

import tilegrad as tg
import tilegrad.nn.functional as F
from tilegrad import nn
from tilegrad.core.target import H200
from tilegrad.train import AdamW

VOCABULARY, TOKENS, LAYERS, WIDTH, HEADS = 50304, 1024, 12, 768, 12
RATE, DECAY = 3e-4, 0.1
BAR = 0.5  # of torch's tokens a second
SECONDS_BAR = 3.0  # of one program in ptxas, of a processor


# ---- ours -----------------------------------------------------------------------------------


class Linear(nn.Linear):
    """A linear layer that computes in bfloat16."""

    def forward(self, x: Any) -> Any:
        """x @ weight.T + bias."""
        return F.linear(x, self.weight.to(tg.bfloat16), self.bias.to(tg.bfloat16))


class Norm(nn.LayerNorm):
    """A layer norm of bfloat16."""

    def forward(self, x: Any) -> Any:
        """x, normalised."""
        weight, bias = (p.to(tg.bfloat16) for p in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = Norm(WIDTH), Norm(WIDTH)
        self.attn, self.proj = Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)
        self.fc, self.out = Linear(WIDTH, 4 * WIDTH), Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        """(B, T, C) -> (B, T, C)."""
        q, k, v = (
            part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
            for part in self.attn(self.ln_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.proj(mixed.flatten(2))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Model(nn.Module):
    """GPT-2; the output weights are the embeddings."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.ln_f = Norm(WIDTH)

    def forward(self, tokens: Any, targets: Any) -> Any:
        """The mean cross-entropy of the targets, (B, T) each."""
        x = (self.wte(tokens) + self.wpe(tg.arange(TOKENS))).to(tg.bfloat16)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight.to(tg.bfloat16))  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.reshape(-1))


def one_step(model: Model, optimizer: AdamW, tokens: Any, targets: Any) -> Any:
    """Forward, backward, update; gives the loss."""
    loss = model(tokens, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


# ---- torch ----------------------------------------------------------------------------------


def torch_model(layers: int) -> Any:
    """The same in torch, with the same names."""
    import torch
    from torch import nn as tnn
    from torch.nn import functional as TF

    class TorchBlock(tnn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = tnn.LayerNorm(WIDTH), tnn.LayerNorm(WIDTH)
            self.attn, self.proj = tnn.Linear(WIDTH, 3 * WIDTH), tnn.Linear(WIDTH, WIDTH)
            self.fc, self.out = tnn.Linear(WIDTH, 4 * WIDTH), tnn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            q, k, v = (
                part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
                for part in self.attn(self.ln_1(x)).chunk(3, -1)
            )
            mixed = TF.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            x = x + self.proj(mixed.flatten(2))
            return x + self.out(TF.gelu(self.fc(self.ln_2(x)), approximate="tanh"))

    class TorchModel(tnn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = tnn.Embedding(VOCABULARY, WIDTH)
            self.wpe = tnn.Embedding(TOKENS, WIDTH)
            self.blocks = tnn.ModuleList(TorchBlock() for _ in range(layers))
            self.ln_f = tnn.LayerNorm(WIDTH)

        def forward(self, tokens: Any, targets: Any) -> Any:
            x = self.wte(tokens) + self.wpe(torch.arange(TOKENS, device=tokens.device))
            for block in self.blocks:
                x = block(x)
            logits = TF.linear(self.ln_f(x), self.wte.weight)
            return TF.cross_entropy(logits.flatten(0, 1).float(), targets.reshape(-1))

    torch.manual_seed(0)
    made = TorchModel().cuda()
    for parameter in made.parameters():
        if parameter.ndim == 2:
            tnn.init.normal_(parameter, 0.0, 0.02)
    return made


def torch_step(model: Any, tokens: Any, targets: Any) -> Callable[[], Any]:
    """One compiled step as a function of nothing."""
    import torch

    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    def run() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


# ---- measuring ------------------------------------------------------------------------------


def text_of(batch: int) -> tuple[Any, Any]:
    """Fixed tokens and those that follow: a repeated text, so that the loss can fall."""
    text = np.random.default_rng(0).integers(0, VOCABULARY, 4096)
    row = np.resize(text, batch * TOKENS + 1)
    return (
        row[:-1].reshape(batch, TOKENS).astype(np.int64),
        row[1:].reshape(batch, TOKENS).astype(np.int64),
    )


def seconds_of(run: Callable[[], Any], wait: Callable[[], Any], count: int) -> float:
    """Seconds of one of `count` steps."""
    wait()
    start = time.perf_counter()
    for _ in range(count):
        run()
    wait()
    return (time.perf_counter() - start) / count


def measure(batch: int, given: argparse.Namespace) -> dict[str, Any]:
    """Both sides at one batch size."""
    import torch

    peer = torch_model(given.layers)
    tokens, targets = text_of(batch)
    model = Model(given.layers)
    theirs = {name: p.detach().clone() for name, p in peer.named_parameters()}
    with tg.no_grad():
        for name, parameter in model.named_parameters():
            parameter.assign(tg.from_torch(theirs[name]))
    torch.cuda.synchronize()
    optimizer = AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    step = tg.jit(one_step)
    inputs = [tg.tensor(x).to("cuda") for x in (tokens, targets)]
    start = time.perf_counter()
    losses = [float(step(model, optimizer, *inputs).item())]
    cold = time.perf_counter() - start
    losses += [float(step(model, optimizer, *inputs).item()) for _ in range(20)]
    sides = [lambda: step(model, optimizer, *inputs)]
    row: dict[str, Any] = {
        "batch": batch,
        "tokens": batch * TOKENS,
        "compile_s": cold,
        "losses": losses,
        "falls": losses[-1] < losses[0] - 1.0,
    }
    if given.peer:
        run = torch_step(peer, *(torch.from_numpy(x).cuda() for x in (tokens, targets)))
        start = time.perf_counter()
        row["torch_losses"] = [float(run())]
        row["torch_compile_s"] = time.perf_counter() - start
        row["torch_losses"] += [float(run()) for _ in range(20)]
        row["agrees"] = abs(losses[0] / row["torch_losses"][0] - 1) < 0.01
        sides.append(run)
    waits = [tg.synchronize, torch.cuda.synchronize]
    times: list[list[float]] = [[] for _ in sides]
    for number in range(given.rounds):
        for side in range(len(sides)) if number % 2 == 0 else reversed(range(len(sides))):
            times[side].append(seconds_of(sides[side], waits[side], given.steps))
    row["ms"] = 1e3 * statistics.median(times[0])
    row["tokens_per_s"] = batch * TOKENS / statistics.median(times[0])
    if given.peer:
        row["torch_ms"] = 1e3 * statistics.median(times[1])
        row["torch_tokens_per_s"] = batch * TOKENS / statistics.median(times[1])
        row["ratio"] = statistics.median(b / a for a, b in zip(*times))
        row["met"] = row["ratio"] >= BAR and row["falls"] and row["agrees"]
    return row


def show(row: dict[str, Any]) -> None:
    """One line."""
    line = (
        f"B={row['batch']}: {row['ms']:.1f} ms, {row['tokens_per_s']:,.0f} tokens/s, compiled"
        f" in {row['compile_s']:.1f} s, loss {row['losses'][0]:.3f} -> {row['losses'][-1]:.3f}"
    )
    if "ratio" in row:
        line += (
            f"; torch {row['torch_ms']:.1f} ms, {row['torch_tokens_per_s']:,.0f} tokens/s,"
            f" loss {row['torch_losses'][0]:.3f}: ratio {row['ratio']:.2f}"
            f" {verdict(row['met'])}"
        )
    print(line, flush=True)


# ---- without a GPU --------------------------------------------------------------------------


def check(batch: int, layers: int) -> dict[str, Any]:
    """Schedule the step for an H200, emit it, and assemble every program of it."""
    from tilegrad.compiler.explain import explain_graph
    from tilegrad.targets.ptx.assemble import assemble

    start = time.perf_counter()
    model = Model(layers)
    optimizer = AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    inputs = [tg.zeros(batch, TOKENS, dtype=tg.int64) for _ in range(2)]
    lowered = tg.jit(one_step).lower(model, optimizer, *inputs)
    found = explain_graph(lowered.inputs, lowered.outputs, name="step", target=H200)
    texts = {program.name: program.ptx for program in found.programs}
    row: dict[str, Any] = {
        "batch": batch,
        "layers": layers,
        "kernels": len(found.kernels),
        "programs": len(texts),
        "launches": sum(len(k.steps) for k in found.schedule_ir.kernels),
        "floor_ms": 1e3 * sum(k.floor for k in found.kernels),
        "seconds": time.perf_counter() - start,
    }
    slow = []
    for name, text in texts.items():
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        (report,) = assemble(text, H200.cpu).reports.values()
        took = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        slow.append((took, report.registers, report.spill_stores, len(text.splitlines()), name))
    row["ptxas_s"], row["spills"] = sum(s[0] for s in slow), [s[-1] for s in slow if s[2]]
    row["slowest_s"] = max(slow)[0]
    print(
        f"B={batch}, {layers} layers: {row['kernels']} kernels, {row['launches']} launches,"
        f" {row['programs']} programs; scheduled and emitted in {row['seconds']:.1f} s; at the"
        f" peaks {row['floor_ms']:.1f} ms = {batch * TOKENS / row['floor_ms'] * 1e3:,.0f}"
        f" tokens/s; ptxas {row['ptxas_s']:.1f} s (0: known already), spills:"
        f" {row['spills'] or 'none'}"
    )
    for took, registers, spilled, lines, name in sorted(slow, reverse=True)[:8]:
        print(
            f"  {took:5.2f} s {registers:4d} registers {spilled:5d} spilled {lines:6d} lines {name}"
        )
    row["met"] = not row["spills"] and row["slowest_s"] <= SECONDS_BAR
    return row


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="16,32", help="comma-separated")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="without torch")
    parser.add_argument("--check", action="store_true", help="assemble the step; needs no GPU")
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    batches = [int(b) for b in given.batches.split(",")]
    record: dict[str, Any] = {"kind": "gpt2-step"}
    if given.check:
        rows = [check(batch, given.layers) for batch in batches]
    else:
        from gpu import Bench

        bench = Bench()
        record |= bench.about() | bench.ceilings()
        tg.set_default_device("cuda")
        rows = []
        for batch in batches:
            rows.append(measure(batch, given))
            show(rows[-1])
    if given.out:
        Path(given.out).write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
    end()
