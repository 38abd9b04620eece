"""Bounds on the CPU: runs in place, small writes, state shared with others, values that changed."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.core.errors import DTypeError, ShapeError, StateError, UserError
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder, paged
from tilegrad.nn import PagedCache

WIDTH = 8


def fresh(array: np.ndarray) -> tg.Tensor:
    """A Tensor whose memory nothing else holds."""
    return tg.tensor(array).clone().realize()


class Counters:
    """State: rows that are written to, and a count that is read while it changes."""

    never_copied = ("rows",)

    def __init__(self, rows: int = 4) -> None:
        self.rows = tg.jit(lambda x: x + 0)(tg.zeros(rows, WIDTH))
        self.count = fresh(np.zeros(WIDTH, np.int32))
        self.last = tg.zeros(3)  # only ever written

    def tensors(self) -> dict[str, tg.Tensor]:
        return {"rows": self.rows, "count": self.count, "last": self.last}


def step(state, x, n):
    state.count.assign(state.count + 1)
    state.rows[1] = x
    state.last.assign(x[:3])
    return state.count * 2 + n


def bound(state=None, function=step):
    state = state or Counters()
    jitted = tg.jit(function)
    x = tg.tensor(np.ones(WIDTH, np.float32))
    return jitted, state, x, jitted.bind(state, x, 3)


def test_runs_change_state_in_place_and_overwrite_results() -> None:
    _, state, _, made = bound()
    places = [t.buffer().pointer for t in state.tensors().values()]
    out = made.outputs
    for turn in range(1, 5):
        assert made.run() is out
        assert out.numpy().tolist() == [2 * turn + 3] * WIDTH
        assert state.count.numpy().tolist() == [turn] * WIDTH
    assert state.rows.numpy().tolist() == [[float(i == 1)] * WIDTH for i in range(4)]
    assert state.last.numpy().tolist() == [1.0] * 3
    assert [t.buffer().pointer for t in state.tensors().values()] == places
    assert made.copied == ["state.count"]  # read and written by one kernel
    assert made.launches == 4 and "bound" in repr(made) and "cpu" in repr(made)


def test_the_jitted_function_itself_has_not_run_at_bind() -> None:
    _, state, _, _ = bound()
    assert state.count.numpy().tolist() == [0] * WIDTH


def test_writes_change_inputs_and_not_the_tensors_given() -> None:
    _, state, x, made = bound()
    made.write("n", 10)
    made.write("x", np.arange(WIDTH))  # whole numbers fit into floats
    assert made.run().numpy().tolist() == [12] * WIDTH
    assert state.rows.numpy()[1].tolist() == list(range(WIDTH))
    assert x.numpy().tolist() == [1.0] * WIDTH
    made.write(1, np.full(WIDTH, 5.0, np.float32))  # by number of the argument
    made.write("x", 7.0, row=2)
    made.run()
    assert state.rows.numpy()[1].tolist() == [5, 5, 7, 5, 5, 5, 5, 5]


def test_writes_to_state_are_seen_by_all() -> None:
    jitted, state, x, made = bound()
    made.write("state.count", np.full(WIDTH, 100))
    made.write("state.rows", np.full(WIDTH, 9.0), row=3)
    assert state.count.numpy().tolist() == [100] * WIDTH
    assert made.run().numpy()[0] == 205 and jitted(state, x, 0).numpy()[0] == 204
    assert state.rows.numpy()[3].tolist() == [9.0] * WIDTH


def test_writes_to_state_leave_what_shares_its_memory() -> None:
    class Shared(Counters):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.unused = tg.zeros(3), tg.zeros(3)  # equal constants: one Buffer

        def tensors(self) -> dict[str, tg.Tensor]:
            return {**super().tensors(), "table": self.table, "unused": self.unused}

    def reads(state, x, n):
        state.count.assign(state.count + 1)
        return state.table + n

    other, data = tg.zeros(3), np.zeros(3, np.float32)
    _, state, _, made = bound(Shared(), reads)
    for value in (1.0, 2.0):
        made.write("state.table", np.full(3, value))
        made.write("state.unused", np.full(3, -value))
        assert made.run().numpy().tolist() == [value + 3] * 3
        assert state.table.numpy()[0] == value and state.unused.numpy()[0] == -value
    assert other.numpy().tolist() == [0.0] * 3
    state = Shared()
    state.table = tg.tensor(data)
    made = bound(state, reads)[3]
    made.write("state.table", np.ones(3))
    assert made.run().numpy()[0] == 4.0 and data.tolist() == [0.0] * 3


def test_what_does_not_fit_is_refused() -> None:
    _, _, _, made = bound()
    with pytest.raises(UserError, match=r"no such argument[\s\S]*state\.count[\s\S]*'y'"):
        made.write("y", 0)
    with pytest.raises(ShapeError, match=r"\(8,\)[\s\S]*\(7,\)"):
        made.write("x", np.zeros(7))
    with pytest.raises(DTypeError, match="int32"):
        made.write("state.count", np.zeros(WIDTH))
    with pytest.raises(ShapeError, match="row"):
        made.write("state.rows", np.zeros(WIDTH), row=4)
    with pytest.raises(UserError, match="no such result"):
        made.read(1)


def test_reads_are_copies() -> None:
    _, _, _, made = bound()
    made.run()
    now, later = made.read(), made.read_later("state.count")
    made.run()
    assert now.tolist() == [5] * WIDTH and later.wait().tolist() == [1] * WIDTH
    assert later.wait().tolist() == [1] * WIDTH and made.read(-1).tolist() == [7] * WIDTH


def test_expressions_never_see_changed_values() -> None:
    _, state, _, made = bound()
    made.run()
    unread, known = state.count + 1, state.count + 2
    alias, out = state.count.detach(), made.outputs + 1
    assert known.numpy()[0] == 3
    made.run()
    for late in (unread, alias, out):
        with pytest.raises(StateError, match=r"overwritten at \S*test_bound\.py[\s\S]*build it"):
            late.numpy()
    assert known.numpy()[0] == 3 and (state.count + 2).numpy()[0] == 4
    assert (made.outputs + 1).numpy()[0] == 8
    assert made.run().numpy()[0] == 9


def test_plain_calls_in_between_work_on_the_same_memory() -> None:
    jitted, state, x, made = bound()
    place = state.rows.buffer().pointer
    for turn in range(6):
        found = made.run() if turn % 2 else jitted(state, x, 3)
        assert found.numpy().tolist() == [2 * turn + 5] * WIDTH
        del found
    assert state.rows.buffer().pointer == place


@pytest.mark.usefixtures("quick_collect")
def test_assigned_state_is_followed() -> None:
    _, state, x, made = bound()
    made.run()
    kept = state.count.detach()  # the old Node lives on
    state.count.assign(np.full(WIDTH, 50, np.int32))
    x.assign(np.full(WIDTH, 4.0, np.float32))
    assert made.run().numpy()[0] == 105 and state.count.numpy()[0] == 51
    assert kept.numpy()[0] == 1 and state.rows.numpy()[1, 0] == 4.0
    gc.collect()
    assert made.run().numpy()[0] == 107


def test_shared_state_is_copied_once_or_refused() -> None:
    state = Counters()
    old = state.count.detach()
    _, _, _, made = bound(state)
    made.run()
    assert old.numpy()[0] == 0 and state.count.numpy()[0] == 1
    state = Counters()
    held = state.rows.detach()
    with pytest.raises(StateError, match=r"state\.rows would be copied"):
        bound(state)
    assert held.numpy()[0, 0] == 0.0


def test_state_that_is_not_in_place_is_named() -> None:
    def swap(state, x, n):
        first = state.rows + 0
        state.rows.assign(state.rows[::-1] * 2)
        return first

    with pytest.raises(StateError, match=r"state\.rows is not written in place"):
        bound(function=swap)

    def gives_old(state, x, n):
        old = state.count
        kept = wrap_same(old)
        state.count.assign(state.count + 1)
        return kept

    from tilegrad.tensor.tensor import wrap

    def wrap_same(tensor):
        return wrap(tensor.node)

    with pytest.raises(StateError, match=r"state\.count[\s\S]*gives back what it was"):
        bound(function=gives_old)


def test_results_that_are_state_are_its_tensors() -> None:
    def both(state, x, n):
        state.rows[0] = x
        state.last.assign(x[:3] * 2)
        return state.rows, {"last": state.last, "x": x, "n": n, "word": "fixed"}

    _, state, x, made = bound(function=both)
    rows, others = made.run()
    assert rows is state.rows and others["last"] is state.last
    assert others["x"].numpy().tolist() == [1.0] * WIDTH and made.copied == ["result"]
    assert others["word"] == "fixed" and others["n"].numpy() == 3
    made.write("n", 8)
    made.write("x", np.full(WIDTH, 2.0))
    made.run()
    assert others["n"].numpy() == 8 and rows.numpy()[0].tolist() == [2.0] * WIDTH
    assert others["x"].numpy().tolist() == [2.0] * WIDTH and x.numpy()[0] == 1.0


def test_state_that_takes_an_argument_as_it_is() -> None:
    def take(state, x, n):
        state.last.assign(x[:3])
        state.count.assign(n.expand(WIDTH).to(tg.int32))
        return x + 1

    def whole(state, x, n):
        state.rows[0] = x
        state.last.assign(state.first)
        return x + 1

    _, state, _, made = bound(function=take)
    made.write("n", 9)
    made.write("x", np.arange(WIDTH))
    made.run()
    assert state.last.numpy().tolist() == [0, 1, 2] and state.count.numpy()[0] == 9
    state = Counters()
    state.first = fresh(np.ones(3, np.float32))
    state.tensors = lambda: {**Counters.tensors(state), "first": state.first}
    with pytest.raises(StateError, match=r"state\.last[\s\S]*where other state is"):
        bound(state, whole)

    class Row:
        def __init__(self) -> None:
            self.row = fresh(np.zeros(WIDTH, np.float32))

        def tensors(self):
            return {"row": self.row}

    def keep(state, x, n):
        state.row.assign(x)
        return x + 1

    _, state, _, made = bound(Row(), keep)
    made.write("x", np.arange(WIDTH))
    assert made.run().numpy()[1] == 2.0 and state.row.numpy()[2] == 2.0
    assert made.copied == ["state.row"]


def test_a_function_that_computes_nothing_new() -> None:
    made = tg.jit(lambda x: x * 1).bind(tg.ones(4))  # the compiler gives the input back
    for value in (3.0, 5.0):
        made.write("x", np.full(4, value))
        assert made.run().numpy().tolist() == [value] * 4


def test_gradients_are_refused() -> None:
    weight = tg.ones(3, requires_grad=True)

    class Holder:
        def tensors(self):
            return {"weight": weight}

    @tg.jit
    def train(holder, x):
        loss = (weight * x).sum()
        loss.backward()
        return loss

    with pytest.raises(UserError, match="gradients"):
        train.bind(Holder(), tg.ones(3))


def test_random_numbers_differ_from_run_to_run() -> None:
    tg.manual_seed(5)
    made = tg.jit(lambda x: x + tg.rand(16)).bind(tg.zeros(16))
    first = made.run().numpy().copy()
    second = made.run().numpy().copy()
    tg.manual_seed(5)
    plain = tg.jit(lambda x: x + tg.rand(16))
    assert (first != second).all()
    assert np.array_equal(plain(tg.zeros(16)).numpy(), first)
    assert np.array_equal(plain(tg.zeros(16)).numpy(), second)


# ---- a decoder over a paged cache ------------------------------------------------------------

LAYERS, PAGE, MOST, CONTEXT = 2, 16, 4, 64


def small_decoder() -> Decoder:
    tg.manual_seed(0)
    made = DecoderConfig(
        "llama",
        vocabulary=32,
        width=32,
        layers=LAYERS,
        heads=2,
        key_heads=1,
        head_width=16,
        hidden=48,
        context=CONTEXT,
    )
    return Decoder(made)


class Slots:
    """What a decode step knows of its requests besides the cache."""

    def __init__(self, requests: int) -> None:
        self.last = fresh(np.arange(requests, dtype=np.int32))

    def tensors(self) -> dict[str, tg.Tensor]:
        return {"last": self.last}


def decode(model, cache, slots, chosen):
    """One token for each chosen request: greedy, in place."""
    ids = slots.last.index_select(0, chosen)
    lengths = cache.lengths.index_select(0, chosen) + 1
    table = cache.table.index_select(0, chosen)
    starts = tg.arange(chosen.shape[0] + 1, dtype=tg.int32)
    attend = paged(model.config, cache, table, lengths, starts, queries=1)
    logits = model.step(ids, lengths - 1, attend, rotated=False)
    found = logits.argmax(-1).to(tg.int32)
    cache.lengths[chosen] = lengths
    slots.last[chosen] = found
    return found


def cache_for(requests: int) -> PagedCache:
    cache = PagedCache(
        LAYERS, requests * MOST, PAGE, 1, 16, requests=requests, most_pages=MOST, dtype=tg.float32
    )
    table = np.arange(requests * MOST, dtype=np.int32).reshape(requests, MOST)
    cache.table.buffer().array((requests, MOST), np.int32)[...] = table
    return cache


def chosen_of(*numbers: int) -> tg.Tensor:
    return tg.tensor(np.array(numbers, np.int32))


def test_bounds_of_two_batch_sizes_share_a_cache_with_plain_calls() -> None:
    model, dynamic = small_decoder(), {"chosen": {0: ("R", 1, 4)}}
    with tg.no_grad():
        plain, cache, slots = tg.jit(decode, dynamic=dynamic), cache_for(4), Slots(4)
        wanted = []
        course = [chosen_of(*n) for n in ((0, 1, 2, 3), (0, 1), (2, 3), (0, 1, 2, 3), (1, 0))] * 4
        for chosen in course:
            wanted.append(plain(model, cache, slots, chosen).numpy().copy())
        other, mine, own = tg.jit(decode, dynamic=dynamic), cache_for(4), Slots(4)
        places = [t.buffer().pointer for t in mine.tensors().values()]
        four = other.bind(model, mine, own, chosen_of(0, 1, 2, 3))
        two = other.bind(model, mine, own, chosen_of(0, 1))
        for turn, chosen in enumerate(course):
            if turn % 7 == 6:
                found = other(model, mine, own, chosen).numpy()
            else:
                which = four if chosen.shape[0] == 4 else two
                which.write("chosen", chosen.numpy())
                found = which.run().numpy()
            assert np.array_equal(found, wanted[turn]), turn
            del found
    assert other.traces == 1
    assert [t.buffer().pointer for t in mine.tensors().values()] == places
    assert np.array_equal(mine.lengths.numpy(), cache.lengths.numpy())
    for ours, theirs in zip(mine.keys, cache.keys):
        assert np.array_equal(ours.numpy(), theirs.numpy())


def test_a_run_does_nothing_for_each_tensor_of_state() -> None:
    _, _, _, made = bound()
    made.run()
    made._inputs.look = None  # type: ignore[assignment, method-assign]
    for value in range(3):
        made.write("n", value)
        made.run()
        made.read()
    with pytest.raises(TypeError):
        tg.zeros(2) + 1  # something was built: it looks once more
        made.run()


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_runs_calls_writes_and_reads(seed) -> None:
    """A random walk, with a model in NumPy beside it; nothing may see a value of another time."""
    draw = np.random.default_rng(seed)
    jitted, state, x, first = bound()
    second = jitted.bind(state, tg.tensor(np.full(WIDTH, 2.0, np.float32)), 7)
    xs, ns = {id(first): 1.0, id(second): 2.0}, {id(first): 3, id(second): 7}
    count, row = 0, 0.0
    kept: list[tuple[tg.Tensor, int]] = []
    for _ in range(150):
        made = (first, second)[draw.integers(2)]
        what = draw.integers(9)
        if what < 3:
            found = made.run().numpy()
            count, row = count + 1, xs[id(made)]
            assert (found == 2 * count + ns[id(made)]).all()
        elif what == 3:
            found = jitted(state, x, 1)
            count, row = count + 1, 1.0
            assert (found.numpy() == 2 * count + 1).all()
        elif what == 4:
            xs[id(made)], ns[id(made)] = float(draw.integers(50)), int(draw.integers(50))
            made.write("x", np.full(WIDTH, xs[id(made)]))
            made.write("n", ns[id(made)])
        elif what == 5:
            count = int(draw.integers(100))
            if draw.integers(2):
                made.write("state.count", np.full(WIDTH, count))
            else:
                state.count.assign(np.full(WIDTH, count, np.int32))
        elif what == 6:
            lazy = state.count + 1 if draw.integers(2) else state.count.detach() + 1
            kept.append((lazy.realize() if draw.integers(2) else lazy, count + 1))
        elif what == 7 and kept:
            late, wanted = kept.pop(draw.integers(len(kept)))
            try:
                value = late.numpy()
            except StateError:
                continue  # it was built before a run and not read: refused, not wrong
            assert (value == wanted).all()
        else:
            assert (state.count.numpy() == count).all() and (state.rows.numpy()[1] == row).all()
            assert (made.read("state.count") == count).all()
        found = None
