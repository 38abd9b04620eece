"""Deadlock and races of the queues, proved from the tokens alone; a token that is gone is seen."""

from __future__ import annotations

import pytest
from npu_programs import small

from tilegrad.core.errors import UserError
from tilegrad.targets.npu.check import Order, check, prove
from tilegrad.targets.npu.instructions import TOKENS, Instruction, assemble, instruction
from tilegrad.targets.npu.layout import Stored, VectorOperand
from tilegrad.targets.npu.parameters import Parameters
from tilegrad.targets.npu.product import Product
from tilegrad.targets.npu.timing import timeline
from tilegrad.tile.array import VectorStep

SIZES = [(1, 1, 1), (11, 10, 13), (40, 5, 70)]


def product(p: Parameters, sizes: tuple[int, int, int]) -> Product:
    """A product with a row and an element for each sum beside it."""
    steps = (VectorStep("add", 0, 1), VectorStep("sub", 3, 2))
    vector_operands = (VectorOperand(True, True), VectorOperand(False, False))
    return Product(p, *sizes, vector_operands=vector_operands, steps=steps, stored=(Stored(4),))


@pytest.mark.parametrize("dataflow", ["ws", "os", "is"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_programs_of_products_are_proved(dataflow: str, sizes: tuple[int, int, int]) -> None:
    p = small(dataflow=dataflow, accumulator_rows=64, bank_rows=64)
    for words in product(p, sizes).program():
        prove(p, words)
        ran = [w for w in Order(p, words).words()]
        assert len(ran) == sum(map(len, timeline(p, words).events))


def without(words: list[Instruction], at: int, bit: int) -> list[Instruction]:
    """The program less one token."""
    known = {name: value for name, value in words[at].values if name != "tokens"}
    changed = instruction(words[at].op, words[at]["tokens"] & ~bit, **known)
    return [*words[:at], changed, *words[at + 1 :]]


@pytest.mark.parametrize("dataflow", ["ws", "os", "is"])
def test_every_wait_of_a_product_is_needed(dataflow: str) -> None:
    """Without any one wait there is a race, or what is posted later piles up."""
    p = small(dataflow=dataflow, accumulator_rows=64, bank_rows=64, tokens=1)
    (words, *_) = product(p, (40, 10, 70)).program()
    seen, missed = 0, []
    for at, one in enumerate(words):
        for name, bit in TOKENS.items():
            if not one["tokens"] & bit or name.startswith("post"):
                continue
            try:
                prove(p, without(words, at, bit))
                missed.append((at, name))
            except UserError as error:
                assert "race in the" in str(error) or "wait for each other" in str(error)
                seen += 1
    assert seen > 8 and not missed


RACES = {
    "scratchpad": """
        move_in local=0 rows=4 columns=4 stride=4
        preload local=3 rows=1
        halt""",
    "accumulators": """
        vector kind=add count=2 result=5 immediate=1
        move_out local=6 rows=1 columns=4 raw=1 dram=64
        halt""",
    "DRAM": """
        move_out local=0 rows=2 columns=4 raw=1 stride=32 dram=64
        move_in local=0 rows=3 columns=4 stride=16 dram=80
        halt""",
    "scratchpad in a loop": """
        config set=1 local=4
        loop turns=3
        move_in local=0 rows=4 columns=4 stride=4 set=1 post_next
        sync queue=execute wait_prev
        end
        preload local=0 rows=4
        loop turns=1
        move_in local=0 rows=1 columns=4 stride=4
        end
        halt""",
}


@pytest.mark.parametrize("name", RACES)
def test_races_by_hand(name: str) -> None:
    with pytest.raises(UserError, match=f"race in the {name.split()[0]}"):
        prove(small(), assemble(RACES[name]))


def test_the_same_with_tokens() -> None:
    ordered = """
        move_in local=0 rows=4 columns=4 stride=4 post_next
        preload local=3 rows=1 wait_prev post_prev post_next
        move_in local=3 rows=1 columns=4 stride=4 wait_next
        move_out local=6 rows=1 columns=4 raw=1 dram=64 wait_prev
        halt"""
    prove(small(), assemble(ordered))


SEEDS = """
    config seed=1 dram=5
    move_out local=0 rows=1 columns=4 dram=64 stochastic=1
    sync queue=execute
    config seed=1 dram=77
    move_out local=1 rows=1 columns=4 dram=128 stochastic=1
    halt"""
SEEDS_IN_A_LOOP = """
    loop turns=2
    config seed=1 dram=5
    move_out local=0 rows=1 columns=4 dram=64 stochastic=1
    end
    halt"""


@pytest.mark.parametrize("words", [SEEDS, SEEDS_IN_A_LOOP])
def test_a_seed_after_a_word_that_draws(words: str) -> None:
    """The store queue draws when it gets there, so no token says with which seed."""
    p = small(stochastic=True)
    for refuses in (prove, check):
        with pytest.raises(UserError, match="race for the seed"):
            refuses(p, assemble(words))
        refuses(p, assemble(words.replace("turns=2", "turns=1").replace("seed=1 dram=77", "")))


def test_queues_that_are_too_short() -> None:
    """Words that wait fill a queue before the one that would post is sent."""
    lines = ["sync queue=execute wait_prev"] * 4
    lines += ["sync queue=load post_next"] * 4 + ["halt"]
    program = assemble("\n".join(lines))
    prove(small(queue=4, tokens=4), program)
    for short in (small(queue=2, tokens=4),):
        with pytest.raises(UserError, match="wait for each other"):
            prove(short, program)
        with pytest.raises(UserError, match="wait for each other"):
            timeline(short, program)


def test_channels_that_are_full() -> None:
    program = assemble("\n".join(["sync queue=load post_next"] * 3 + ["halt"]))
    prove(small(tokens=3), program)
    with pytest.raises(UserError, match="no room for a token"):
        prove(small(tokens=2), program)
