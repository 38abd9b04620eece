"""What the server counts, for Prometheus and for the live view.

Names and shapes are vLLM's under another prefix, so that dashboards need one change. Tokens are
counted in plain lists, since a counter of the library costs more than a token may; they become
metrics when somebody asks. Invariant: counts never fall.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from typing import Any

from .engine.generation import Generation
from .refused import Refused

PREFIX = "tilegrad:"
FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LONG = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
COUNTS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
STEP = tuple(float(1 << power) for power in range(15))
WINDOW = 5.0  # seconds that a rate looks back
ENGINE = ("queried", "hits", "preempted", "drafts", "guessed", "true")  # counts of the engine's own


class Histogram:
    """Counts of values by upper bounds."""

    def __init__(self, name: str, words: str, bounds: tuple[float, ...]) -> None:
        self.name, self.words, self.bounds = name, words, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Bounds with how many values are at most there."""
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            yield ("+Inf" if bound == float("inf") else repr(float(bound))), total


class Metrics:
    """All counts of one server."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.begun = time.time()
        self.now: dict[str, Any] = {}  # what the engine last said of itself
        self.earlier = dict.fromkeys(ENGINE, 0)  # what engines counted that are gone
        self.prompt_tokens = self.made_tokens = 0
        self.steps = 0
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.refused: dict[int, int] = {}  # by status
        self.recent: deque[tuple[float, int]] = deque()  # (when, tokens) of steps
        self.first = Histogram("time_to_first_token_seconds", "Until the first token.", FIRST)
        self.between = Histogram("inter_token_latency_seconds", "Between tokens.", BETWEEN)
        self.per_token = Histogram(
            "request_time_per_output_token_seconds", "Mean between a request's tokens.", BETWEEN
        )
        self.whole = Histogram("e2e_request_latency_seconds", "Of a whole request.", LONG)
        self.queue = Histogram("request_queue_time_seconds", "Waiting for a place.", LONG)
        self.prefill = Histogram("request_prefill_time_seconds", "Until the first token.", LONG)
        self.inference = Histogram("request_inference_time_seconds", "While it ran.", LONG)
        self.decode = Histogram("request_decode_time_seconds", "From first to last token.", LONG)
        self.prompt = Histogram("request_prompt_tokens", "Tokens of prompts.", COUNTS)
        self.answer = Histogram("request_generation_tokens", "Tokens of answers.", COUNTS)
        self.iteration = Histogram("iteration_tokens_total", "Tokens made by a step.", STEP)

    # ---- counting -------------------------------------------------------------------------------

    def stepped(self, body: dict[str, Any], now: float) -> None:
        """A step of the engine came."""
        made = len(body["made"]) // 3
        self.now = body["now"]
        self.made_tokens += made
        self.steps += 1
        if made:
            self.iteration.observe(made)
        recent = self.recent
        recent.append((now, made))
        while now - recent[0][0] > WINDOW:
            recent.popleft()

    def restarted(self) -> None:
        """Another engine begins to count at 0."""
        for name in ENGINE:
            self.earlier[name] += self.now.get(name, 0)
        self.now = {n: v for n, v in self.now.items() if n not in ENGINE}

    def began(self, one: Generation) -> None:
        """A request was taken."""
        self.prompt_tokens += one.prompt
        self.prompt.observe(one.prompt)

    def ended(self, one: Generation) -> None:
        """A request ended, one way or another."""
        word = one.finish if one.finish in self.finished else "abort"
        self.finished[word or "abort"] += 1
        made = len(one.made)
        self.answer.observe(made)
        if one.started:
            self.queue.observe(max(0.0, one.started - one.begun))
        if made:
            self.whole.observe(one.last - one.begun)
            self.prefill.observe(max(0.0, one.first - (one.started or one.begun)))
            self.inference.observe(max(0.0, one.last - (one.started or one.begun)))
            self.decode.observe(one.last - one.first)
        if made > 1:
            self.per_token.observe((one.last - one.first) / (made - 1))

    @property
    def rate(self) -> float:
        """Tokens a second, lately."""
        now = time.perf_counter()
        recent = [(when, made) for when, made in self.recent if now - when <= WINDOW]
        if not recent:
            return 0.0
        return sum(made for _, made in recent) / max(0.1, now - recent[0][0])

    # ---- showing --------------------------------------------------------------------------------

    def collect(self) -> Iterator[Any]:
        """All metrics as the library's families."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        label, value = ["model_name"], [self.model]
        for name, words, number in self._gauges():
            gauge = GaugeMetricFamily(PREFIX + name, words, labels=label)
            gauge.add_metric(value, number)
            yield gauge
        for name, words, number in self._counters():
            counter = CounterMetricFamily(PREFIX + name, words, labels=label)
            counter.add_metric(value, number)
            yield counter
        if "adapters" in self.now:
            yield self._adapters(GaugeMetricFamily)
        done = CounterMetricFamily(
            PREFIX + "request_success",
            "Requests that ended, by why.",
            labels=[*label, "finished_reason"],
        )
        for word, count in self.finished.items():
            done.add_metric([*value, word], count)
        yield done
        refused = CounterMetricFamily(
            PREFIX + "http_errors", "Requests refused, by status.", labels=[*label, "status"]
        )
        for status, count in sorted(self.refused.items()):
            refused.add_metric([*value, str(status)], count)
        yield refused
        for histogram in vars(self).values():
            if isinstance(histogram, Histogram):
                family = HistogramMetricFamily(
                    PREFIX + histogram.name, histogram.words, labels=label
                )
                family.add_metric(value, list(histogram.buckets()), histogram.sum)
                yield family

    def _adapters(self, family: Any) -> Any:
        """Which adapters requests have, as labels; the value is when that was so."""
        count, *names = self.now["adapters"]
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        gauge = family(PREFIX + "lora_requests_info", "Adapters of requests.", labels=labels)
        gauge.add_metric([str(count), *(",".join(some) for some in names)], time.time())
        return gauge

    def _gauges(self) -> list[tuple[str, str, float]]:
        now = self.now
        share = now.get("used", 0) / max(1, now.get("pages", 1))
        return [
            ("num_requests_running", "Requests in the batch.", now.get("running", 0)),
            ("num_requests_waiting", "Requests that wait.", now.get("waiting", 0)),
            ("kv_cache_usage_perc", "Share of pages in use; 1 is all.", share),
            ("step_seconds", "How long the last step took.", now.get("seconds", 0.0)),
        ]

    def _counters(self) -> list[tuple[str, str, float]]:
        total = {n: count + self.now.get(n, 0) for n, count in self.earlier.items()}
        found: list[tuple[str, str, float]] = [
            ("prompt_tokens", "Tokens of prompts.", self.prompt_tokens),
            ("generation_tokens", "Tokens made.", self.made_tokens),
            ("prefix_cache_queries", "Tokens looked up.", total["queried"]),
            ("prefix_cache_hits", "Tokens found.", total["hits"]),
            ("num_preemptions", "Requests set back.", total["preempted"]),
            ("steps", "Steps of the engine.", self.steps),
        ]
        if "drafts" in self.now or total["drafts"]:
            found += [
                ("spec_decode_num_drafts", "Times that tokens were guessed.", total["drafts"]),
                ("spec_decode_num_draft_tokens", "Tokens guessed.", total["guessed"]),
                ("spec_decode_num_accepted_tokens", "Guesses that came true.", total["true"]),
            ]
        return found

    def text(self) -> bytes:
        """All metrics in Prometheus's text."""
        try:
            from prometheus_client import CollectorRegistry, generate_latest
        except ImportError:
            raise Refused(
                "this server has no metrics: prometheus_client is not installed", status=501
            ) from None
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)


__all__ = ["Metrics"]
