"""Sampling against the float64 reference: sets, draws, penalties, logprobs, state, and PTX.

The file is long because it holds one rule of sampling after another.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from sampling_reference import cut as exact_cut
from sampling_reference import distribution, log_softmax, processed
from simulated import TEXTS, assembled, run_graph  # noqa: F401

import tilegrad as tg
from tilegrad import kernel, tile
from tilegrad.core.dtype import int32
from tilegrad.core.errors import ShapeError, StateError, UserError
from tilegrad.core.target import H200
from tilegrad.generate.sampling import (
    MIN_P,
    TOP_P,
    Sampling,
    SamplingState,
    Variant,
    greedy,
    needs,
    sample,
)
from tilegrad.graph import draw_reference
from tilegrad.kernels import draw as kernels
from tilegrad.tensor.kernel import Kernel

ALL = Variant(draws=True, penalties=True, bias=True)


def ints(*values) -> tg.Tensor:
    return tg.tensor(np.array(values, np.int32))


def state_of(vocabulary: int, *samplings: Sampling, prompt=(), output=()) -> SamplingState:
    """A state with a slot for each Sampling."""
    state = SamplingState(len(samplings) + 1, vocabulary)
    for slot, sampling in enumerate(samplings):
        state.set_row(slot, sampling, prompt, output)
    return state


def step(logits, state, slots, positions, variant):
    """One jitted step, as arrays."""

    def run(logits, state, slots, positions):
        return sample(logits, state, slots, positions, variant)

    found = tg.jit(run)(tg.tensor(logits), state, ints(*slots), ints(*positions))
    return [None if x is None else x.numpy() for x in found]


def drawn(logits: np.ndarray, sampling: Sampling, count: int, prompt=(), output=()) -> np.ndarray:
    """Draws of one request at `count` positions, all for the same logits."""
    state = state_of(len(logits), sampling, prompt=prompt, output=output)
    rows = np.broadcast_to(np.asarray(logits, np.float32), (count, len(logits))).copy()
    variant = needs([sampling])
    return step(rows, state, [0] * count, range(count), variant)[0]


def chi_square_fits(found: np.ndarray, probability: np.ndarray) -> None:
    """Draws have a distribution, at a level that fixed seeds pass or do not."""
    count = np.bincount(found, minlength=len(probability))
    assert not count[probability == 0].any(), "a token that was cut was drawn"
    expected = probability * len(found)
    rare = expected < 8
    bins = [(count[i], expected[i]) for i in np.flatnonzero(~rare)]
    if expected[rare].sum() >= 4:
        bins.append((count[rare].sum(), expected[rare].sum()))
    freedom = len(bins) - 1
    if freedom < 1:
        return
    statistic = sum((c - e) ** 2 / e for c, e in bins)
    assert statistic < freedom + 4.2 * math.sqrt(2 * freedom) + 6, (statistic, freedom)


# ---- greedy ------------------------------------------------------------------------------------


def test_greedy_takes_the_first_of_the_largest() -> None:
    rows = np.zeros((4, 130), np.float32)
    rows[0, [7, 9]] = 2.0
    rows[1] = -np.inf
    rows[1, 99] = -5.0
    rows[2, [128, 129]] = 3e38
    assert greedy(tg.tensor(rows)).ids.tolist() == [7, 99, 128, 0]
    assert greedy(tg.tensor(rows)).ids.dtype is int32


@pytest.mark.parametrize("variant", [needs([]), Variant(draws=True), ALL])
def test_temperature_0_is_greedy_in_any_variant(variant) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(6, 301)).astype(np.float32)
    rows[1, [5, 200]] = 9.0
    rows[2, 3:] = -np.inf
    rows[3] = np.nextafter(np.float32(7.0), np.float32(0.0))  # one that is barely larger
    rows[3, 250] = 7.0
    rows[4, 17] = 3e38
    state = state_of(301, Sampling(), Sampling(temperature=1e-6, top_k=9, top_p=0.5, min_p=1.0))
    found = step(rows, state, [0, 1, 0, 1, 0, 2], range(6), variant)[0]
    assert found.tolist() == rows.argmax(-1).tolist()


# ---- sets --------------------------------------------------------------------------------------


@kernel
def cuts(p, tokens, sizes, limits, sums, floats, slots, *, block: int):
    """The key and the place that `draw` cuts each row at."""
    rows = p.shape[0]
    row = tile.grid(rows)
    keys, places = tile.result((rows,), int32), tile.result((rows,), int32)
    slot, size = tile.load(slots, (row,), ()), tile.load(sizes, (row, 0), ())
    share, k = tile.load(floats, (slot, TOP_P), ()), tile.load(limits, (row, 0), ())
    listed, total = tile.maximum(size, kernels.whole(0)), tile.load(sums, (row, 0), ())
    floor = kernels.least(floats, slot, MIN_P)
    one = kernels.Listed(p, tokens, row, listed, block)
    key, place = one.cut(k, share, total, floor)
    tile.store(keys, (row,), key)
    tile.store(places, (row,), place)


@tg.jit
def cut_rows(p, floats, top_k, seeds, slots):
    """Where rows are cut, how many tokens are listed, who is how early in each part."""
    static = {"top_p": TOP_P, "min_p": MIN_P, "block": 64, "parts": 2, "skip": True}
    listed = Kernel(kernels.pick)(p, floats, top_k, seeds, slots, slots, **static)
    return cuts(p, *listed[:4], floats, slots, block=64), listed[1][:, 0], listed[4:]


def kept(p: np.ndarray, samplings: list[Sampling]) -> np.ndarray:
    """Which tokens of each row stay, as the kernels say."""
    state = state_of(p.shape[1], *samplings)
    slots = ints(*range(len(p)))
    (keys, places), _, (early, winners) = cut_rows(
        tg.tensor(p), state.floats, state.top_k, state.seeds, slots
    )
    bits, place = p.view(np.int32), np.arange(p.shape[1])
    key, last = keys.numpy()[:, None], places.numpy()[:, None]
    found = (bits > key) | ((bits == key) & (place <= last))
    for row, sampling in enumerate(samplings):
        if sampling.top_k == 1:  # has no list: the likeliest is first
            part = int(early.numpy()[row].argmax())
            found[row] = place == winners.numpy()[row, part]
    return found


LIMITS = some.builds(
    Sampling,
    temperature=some.just(1.0),
    top_k=some.sampled_from([0, -1, 1, 2, 3, 7, 30, 500]),
    top_p=some.sampled_from([1.0, 0.999, 0.95, 0.7, 0.31, 0.003]),
    min_p=some.sampled_from([0.0, 0.0, 0.021, 0.3, 1.0]),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    some.lists(LIMITS, min_size=6, max_size=6),
    some.integers(0, 2**32 - 1),
    some.sampled_from(["ties", "plain", "few", "wide", "flat"]),
)
def test_sets_are_those_of_the_reference(samplings, seed, kind) -> None:
    rng = np.random.default_rng(seed)
    rows = 6
    x = {
        "ties": lambda: rng.integers(-6, 3, (rows, 150)) / 2,
        "wide": lambda: rng.normal(size=(rows, 150)) * 20,
        "plain": lambda: rng.normal(size=(rows, 150)) * 2,
        "few": lambda: np.where(
            rng.random((rows, 150)) < 0.03, rng.normal(size=(rows, 150)), -np.inf
        ),
        "flat": lambda: np.zeros((rows, 150)),
    }[kind]()
    x[:, 11] = x.max(-1) if kind != "few" else 1.0
    p = np.exp(x - x.max(-1, keepdims=True)).astype(np.float32)
    found = kept(p, samplings)
    for row, s in enumerate(samplings):
        expected, near = exact_cut(
            p[row].astype(np.float64),
            s.top_k,
            float(np.float32(s.top_p)),
            float(np.float32(s.min_p)),
        )
        if near > 1e-5:
            assert np.flatnonzero(found[row]).tolist() == np.flatnonzero(expected).tolist()


@pytest.mark.parametrize("vocabulary", [49152, 5000])
def test_sets_of_large_vocabularies(vocabulary) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5, vocabulary)) * np.array([1.0, 2, 4, 0.01, 3])[:, None]
    x[4] = np.round(x[4] * 8) / 8  # as bfloat16 logits: many equals
    p = np.exp(x - x.max(-1, keepdims=True)).astype(np.float32)
    samplings = [
        Sampling(temperature=1, top_p=0.9),
        Sampling(temperature=1, top_k=50),
        Sampling(temperature=1, top_k=400, top_p=0.95),
        Sampling(temperature=1, top_p=0.99),
        Sampling(temperature=1, top_k=1111, top_p=0.8, min_p=0.001),
    ]
    found = kept(p, samplings)
    for row, s in enumerate(samplings):
        expected, near = exact_cut(p[row].astype(np.float64), s.top_k, s.top_p, s.min_p)
        differ = np.flatnonzero(found[row] != expected)
        # float32 sums of 49152 terms may place the end of top-p one token away
        assert len(differ) <= (0 if near > 1e-5 else 2), (row, near, differ)


def test_rows_without_limits_are_not_listed() -> None:
    p = np.ones((2, 100), np.float32)
    state = state_of(100, Sampling(temperature=1), Sampling(temperature=1, top_k=100))
    _, sizes, _ = cut_rows(tg.tensor(p), state.floats, state.top_k, state.seeds, ints(0, 1))
    assert sizes.tolist() == [-1, -1]  # a top_k that all fit in is no limit


def test_rows_of_nobody_are_not_read() -> None:
    """Nothing of them is looked at: what is there would win, and would be listed."""
    rows, vocabulary = 4, 600
    state = state_of(vocabulary, *[Sampling(temperature=1, seed=s) for s in range(3)])
    state.close_row(3)
    p = np.ones((rows, vocabulary), np.float32)
    assert state.top_k.tolist() == [0, 0, 0, -1]
    for slot, read in ((0, True), (3, False)):
        slots = ints(*[slot] * rows)
        _, sizes, (early, winners) = cut_rows(
            tg.tensor(p), state.floats, state.top_k, state.seeds, slots
        )
        assert (early.numpy() > 0).all() == read == (winners.numpy() > 0).all()
        assert (sizes.numpy() == (-1 if read else 0)).all()


@pytest.mark.parametrize("limits", [{}, {"top_k": 1}, {"top_p": 0.5}, {"top_k": 5000}])
def test_parts_of_a_row_draw_what_the_whole_draws(limits) -> None:
    """To the bit, and what the reference draws, however many programs share a row."""
    rows, vocabulary = 24, 5000
    p = np.exp(np.random.default_rng(8).normal(size=(rows, vocabulary)) * 2).astype(np.float32)
    p /= p.max(-1, keepdims=True)
    state = state_of(vocabulary, *[Sampling(temperature=1, seed=s, **limits) for s in range(rows)])
    slots = ints(*range(rows))
    given = (tg.tensor(p), state.floats, state.top_k, state.seeds, slots, slots)
    columns = {"top_p": TOP_P, "min_p": MIN_P}
    found = []
    for parts, block in ((1, 64), (2, 64), (16, 64), (4, 256)):
        listed = Kernel(kernels.pick)(*given, block=block, parts=parts, skip=True, **columns)
        rest = (state.floats, state.seeds, slots, slots)
        drawn = Kernel(kernels.draw)(given[0], *listed, *rest, block=64, **columns)
        found.append(drawn.tolist())
    wanted = draw_reference.draw([t.numpy() for t in given], columns).tolist()
    assert found == [wanted] * len(found)


# ---- draws -------------------------------------------------------------------------------------


RNG = np.random.default_rng(5)
LOGITS = {
    "plain": RNG.normal(size=200) * 2,
    "ties": RNG.integers(-3, 3, 130) / 2,
    "holes": np.where(RNG.random(90) < 0.5, -np.inf, RNG.normal(size=90)),
    "huge": np.concatenate([np.full(3, 3e38), RNG.normal(size=77)]),
    "one": np.where(np.arange(100) == 64, 30.0, -np.inf),
    "flat": np.zeros(1000),
}
SETTINGS = {
    "temperature": {"temperature": 1.0},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.0, "top_k": 60},
    "top_k": {"temperature": 0.8, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.83},
    "min_p": {"temperature": 1.0, "min_p": 0.21},
    "all": {"temperature": 0.9, "top_k": 40, "top_p": 0.77, "min_p": 0.013},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_draws_have_the_distribution(name, setting) -> None:
    logits, given = LOGITS[name].astype(np.float32), SETTINGS[setting]
    found = drawn(logits, Sampling(seed=11, **given), 4000)
    chi_square_fits(found, distribution(logits.astype(np.float64), **given))


def test_rare_tokens_of_a_large_vocabulary() -> None:
    """Uniform over 2**17 tokens: no place is preferred, and few draws meet."""
    found = np.concatenate(
        [drawn(np.zeros(1 << 17), Sampling(temperature=1, seed=s), 40) for s in range(5)]
    )
    assert len(set(found.tolist())) >= 198
    chi_square_fits(found >> 14, np.full(8, 1 / 8))


def test_penalties_and_bias() -> None:
    logits = (np.random.default_rng(8).normal(size=60) * 1.5).astype(np.float32)
    logits[[4, 30]] = -np.inf
    prompt, output = [1, 2, 2, 3, 4, 50], [3, 7, 7, 7, 20, 20]
    bias = {7: 1.5, 20: 2.0, 40: -math.inf, 59: -1.0}
    given = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.6}
    sampling = Sampling(temperature=0.9, top_p=0.97, seed=2, logit_bias=bias, **given)
    x = processed(
        logits,
        bias=bias,
        repetition=1.3,
        presence=0.4,
        frequency=-0.6,
        prompt=prompt,
        output=output,
    )
    found = drawn(logits, sampling, 4000, prompt, output)
    chi_square_fits(found, distribution(x, temperature=0.9, top_p=0.97))
    cold = Sampling(logit_bias=bias, **given)
    assert drawn(logits, cold, 2, prompt, output).tolist() == [int(x.argmax())] * 2


def test_tokens_are_counted_as_they_are_drawn() -> None:
    """Greedy under a presence penalty: each step takes the largest that was not taken yet."""
    logits = np.linspace(1.0, 1.5, 40).astype(np.float32)[None]
    state = state_of(40, Sampling(presence_penalty=2.0), prompt=[39])

    @tg.jit
    def run(logits, state, slots, positions):
        return sample(logits, state, slots, positions, ALL).ids

    place = state.counts.buffer().pointer
    found = [int(run(tg.tensor(logits), state, ints(0), ints(i))[0]) for i in range(5)]
    assert found == [39, 38, 37, 36, 35]
    counts = state.counts.numpy()[0] & ((1 << 30) - 1)
    assert counts.tolist() == [0] * 35 + [1] * 5
    assert state.counts.buffer().pointer == place, "the counts were copied"
    state.set_row(0, Sampling(presence_penalty=2.0), [], [39, 39])
    assert state.counts.numpy()[0, 39] == 2 and not state.counts.numpy()[0, :39].any()


def test_counts_are_never_copied() -> None:
    state = state_of(50, Sampling(presence_penalty=1.0))
    held = tg.Tensor(state.counts)
    with pytest.raises(StateError, match="counts would be copied"):
        step(np.zeros((1, 50), np.float32), state, [0], [0], ALL)
    del held


# ---- randomness --------------------------------------------------------------------------------


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=(1, 500)) * 2).astype(np.float32)
    mine = Sampling(temperature=1.0, top_p=0.9, seed=-77)
    alone = state_of(500, mine)
    first = [int(step(logits, alone, [0], [i], Variant(draws=True))[0][0]) for i in range(12)]
    others = [Sampling(temperature=1.3, seed=4), Sampling(), Sampling(temperature=0.5, top_k=3)]
    crowd = state_of(500, *others, mine)
    for i, expected in enumerate(first):
        rows = (rng.normal(size=(9, 500)) * 3).astype(np.float32)
        rows[i % 9] = logits[0]
        slots, positions = rng.integers(0, 3, 9), rng.integers(0, 99, 9)
        slots[i % 9], positions[i % 9] = 3, i
        assert step(rows, crowd, slots, positions, ALL)[0][i % 9] == expected
    assert len(set(first)) > 4


def test_seeds_and_positions_differ() -> None:
    logits = np.zeros(4096, np.float32)
    draws = [drawn(logits, Sampling(temperature=1.0, seed=s), 64) for s in (0, 1, 1 << 32, -1)]
    assert all(len(set(d.tolist())) > 60 for d in draws)
    for a in range(4):
        for b in range(a):
            assert (draws[a] == draws[b]).sum() <= 2
    again = drawn(logits, Sampling(temperature=1.0, seed=1), 64)
    assert again.tolist() == draws[1].tolist()
    free = [drawn(logits, Sampling(temperature=1.0), 64) for _ in range(2)]
    assert (free[0] == free[1]).sum() <= 2  # without a seed, the system's


def test_16_bit_logits_and_any_number_of_rows() -> None:
    run = tg.jit(
        lambda logits, state, slots, positions: sample(logits, state, slots, positions, ALL).ids,
        dynamic={n: {0: ("R", 1, 64)} for n in ("logits", "slots", "positions")},
    )
    rows = (np.random.default_rng(9).normal(size=(20, 300)) * 3).astype(np.float32)
    wide = tg.tensor(rows).to(tg.bfloat16)
    state = state_of(300, Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=6))
    whole = run(wide, state, ints(*[0] * 20), ints(*range(20))).tolist()
    for many in (1, 3, 20):
        found = run(wide[:many].clone(), state, ints(*[0] * many), ints(*range(many)))
        assert found.tolist() == whole[:many]
    assert run.traces == 1
    plain = step(wide.to(tg.float32).numpy(), state, [0] * 20, range(20), ALL)[0]
    assert plain.tolist() == whole


# ---- logprobs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_of_the_logits_as_given(temperature) -> None:
    rng = np.random.default_rng(4)
    rows = (rng.normal(size=(3, 700)) * 4).astype(np.float32)
    rows[0, 100:] = -np.inf
    rows[1, [3, 600]] = 20.0
    rows[2] = np.round(rows[2])  # equals
    s = Sampling(temperature=temperature, presence_penalty=1.5, logit_bias={5: 3.0}, logprobs=5)
    variant = needs([s])
    assert variant == Variant(True, True, True, 20)
    state = state_of(700, s, prompt=[1], output=[5, 6])
    ids, chosen, top_ids, top = step(rows, state, [0] * 3, [1, 2, 3], variant)
    assert top_ids.shape == top.shape == (3, 20) and top_ids.dtype == np.int32
    for row in range(3):
        exact = log_softmax(rows[row])
        order = sorted(range(700), key=lambda i: (-exact[i], i))[:20]
        assert top_ids[row].tolist() == order
        assert np.abs(top[row] - exact[order]).max() < 2e-5
        assert abs(chosen[row] - exact[ids[row]]) < 2e-5


def test_logprobs_of_tiny_vocabularies() -> None:
    state = state_of(3, Sampling(logprobs=20))
    rows = np.array([[1.0, -np.inf, 2.0]], np.float32)
    ids, chosen, top_ids, top = step(rows, state, [0], [0], needs([Sampling(logprobs=20)]))
    assert ids.tolist() == [2] and top_ids.tolist() == [[2, 0, 1]]
    assert np.allclose(top[0, :2], log_softmax(rows[0])[[2, 0]], atol=1e-6)
    assert top[0, 2] == -np.inf and np.isclose(chosen[0], top[0, 0])


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", "1"),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", 1 << 63),
        ("seed", 0.5),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", [1, 2]),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", dict.fromkeys(range(513), 1.0)),
    ],
)
def test_what_is_out_of_range_is_named(field, value) -> None:
    with pytest.raises(UserError, match=field):
        Sampling(**{field: value})


def test_limits_at_the_ends_of_their_ranges() -> None:
    given = {
        "temperature": 2,
        "top_k": -1,
        "top_p": 1,
        "min_p": 1,
        "repetition_penalty": 1e-3,
        "seed": -(1 << 63),
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "logit_bias": {0: -math.inf},
        "logprobs": 20,
    }
    made = Sampling(**given)
    assert {name: getattr(made, name) for name in given} == given


def test_state_refuses_what_does_not_fit() -> None:
    state = SamplingState(2, 10)
    for wrong in (
        lambda: state.set_row(2, Sampling()),
        lambda: state.clear_row(-1),
        lambda: state.set_row(0, Sampling(logit_bias={10: 1.0})),
        lambda: state.set_row(0, Sampling(presence_penalty=1.0), [10]),
        lambda: SamplingState(0, 10),
        lambda: SamplingState(1, 1 << 25),
    ):
        with pytest.raises(UserError):
            wrong()
    with pytest.raises(ShapeError, match="logits"):
        sample(tg.zeros(1, 9), state, ints(0), ints(0), ALL)
    with pytest.raises(ShapeError, match="slots"):
        sample(tg.zeros(1, 10), state, ints(0, 1), ints(0), ALL)
    with pytest.raises(ShapeError, match="positions"):
        sample(tg.zeros(1, 10), state, ints(0), tg.zeros(1), ALL)


def test_a_row_is_forgotten() -> None:
    state = state_of(10, Sampling(temperature=2.0, logit_bias={3: 50.0}))
    assert step(np.zeros((1, 10), np.float32), state, [0], [0], ALL)[0].tolist() == [3]
    state.clear_row(0)
    assert step(np.zeros((1, 10), np.float32), state, [0], [0], ALL)[0].tolist() == [0]
    state.set_row(0, Sampling(logit_bias={4: 1.0}))
    assert step(np.zeros((1, 10), np.float32), state, [0], [0], ALL)[0].tolist() == [4]


def test_few_variants_are_told_apart() -> None:
    assert needs([]) == needs([None, Sampling()]) == Variant()
    assert needs([Sampling(), Sampling(temperature=1, top_k=4)]) == Variant(draws=True)
    assert needs([Sampling(presence_penalty=1)]) == needs([Sampling(logit_bias={1: 1.0})]) == ALL
    assert needs([Sampling(logprobs=1)]) == Variant(logprobs=1)
    assert needs([Sampling(logprobs=2), Sampling(temperature=1)]) == Variant(True, logprobs=20)


# ---- GPUs --------------------------------------------------------------------------------------


def lowered(rows: int, vocabulary: int, variant: Variant, *samplings: Sampling):
    """(Lowered for an H200, the state)."""
    state = state_of(vocabulary, *samplings, prompt=[1, 2], output=[2])
    slots = ints(*[i % len(samplings) for i in range(rows)])

    def run(logits, state, slots, positions):
        return sample(logits, state, slots, positions, variant)

    made = tg.jit(run).lower(tg.zeros(rows, vocabulary), state, slots, slots)
    return made, state


@pytest.mark.usefixtures("assembled")
@pytest.mark.parametrize("masks", [False, True])
def test_ptx_draws_what_the_cpu_draws(masks: bool) -> None:
    samplings = (
        Sampling(temperature=0.9, top_k=30, top_p=0.8, seed=1),
        Sampling(temperature=1.2, seed=5, logit_bias={7: 1.0}, presence_penalty=1.0),
    )
    rows, vocabulary = 2, 280
    variant = Variant(True, True, True, 1, masks)
    made, state = lowered(rows, vocabulary, variant, *samplings)
    words = np.random.default_rng(4).integers(-(1 << 31), 1 << 31, (rows, 9)).astype(np.int32)
    for slot in range(rows):
        state.allow(slot, words[slot] if masks else None)
    logits = np.random.default_rng(2).normal(size=(rows, vocabulary)).astype(np.float32) * 2
    logits[0] = np.round(logits[0])  # equals at both cuts
    own = {n: t.numpy().copy() for n, t in state.tensors().items()}
    slots = np.arange(rows, dtype=np.int32)
    values = [
        own[s.name] if s.kind == "state" else logits if s.index == 0 else slots
        for s in made.sources
    ]
    found = run_graph(made.inputs, made.outputs, values)
    expected = step(logits, state, slots, slots, variant)
    for place, want in zip(made.outcomes, expected):
        got = found[place.number]
        assert (
            np.allclose(got, want, atol=2e-5)
            if want.dtype == np.float32
            else got.tolist() == want.tolist()
        )


@pytest.mark.usefixtures("assembled")
@pytest.mark.parametrize("rows, vocabulary", [(128, 128256), (1, 262144)])
def test_ptx_of_large_vocabularies_assembles(rows, vocabulary) -> None:
    from tilegrad.compiler.compile import schedule_for
    from tilegrad.schedule.schedule import Launch
    from tilegrad.targets.ptx.emit import emit

    made, _ = lowered(rows, vocabulary, Variant(draws=True), Sampling(temperature=1.0, top_k=9))
    schedule = schedule_for(made.inputs, made.outputs, H200, made.donate)
    steps = [s for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    # the last says which rows have a token; in a step it is part of the update of ids
    assert len(steps) == (4 if rows > 1 else 6), [s.body.name for s in steps]
    for one in steps:
        text, _ = emit(one.body, "entry", H200)
        assert "$look" not in text, "places are compared one by one"
        TEXTS[text] = text
