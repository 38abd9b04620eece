"""A small dialect for the tests of the IR engine."""

from tilegrad.core.dtype import float32, int32
from tilegrad.core.errors import ShapeError
from tilegrad.ir.node import Dialect, Op
from tilegrad.ir.types import NOTHING, Array, Memory, Tile, Tuple

toy = Dialect("toy")
other = Dialect("toy_other")


def _same(a, b):
    if a.type != b.type:
        raise ShapeError("types differ", op="add", expected=a.type, got=b.type)
    return a.type


add = Op(toy, "add", _same, commutative=True)
multiply = Op(toy, "multiply", _same)
negate = Op(toy, "negate", lambda a: a.type)
expand = Op(toy, "expand", lambda a, *, shape: Array(shape, a.dtype), attrs=("shape",))
constant = Op(toy, "constant", lambda *, value, dtype: Array((), dtype), attrs=("value", "dtype"))
fact = Op(toy, "fact", lambda *, fact: Array((), int32), attrs=("fact",))
pair = Op(toy, "pair", lambda a, b: Tuple((a.type, b.type)))
get = Op(toy, "get", lambda a, *, index: a.type.items[index], attrs=("index",))
given = Op(toy, "given", lambda *inputs, **attrs: None, attrs=("tag",))
loop = Op(toy, "loop", lambda *inputs, count, blocks: blocks[0].results[0].type, attrs=("count",))
branch = Op(toy, "branch", lambda condition, *, blocks: NOTHING)
allocate = Op(
    toy,
    "allocate",
    lambda *, shape, dtype, scope: Memory(shape, dtype, scope),
    attrs=("shape", "dtype", "scope"),
    effect=True,
)
load = Op(
    toy, "load", lambda place, *, shape: Tile(shape, place.dtype), attrs=("shape",), effect=True
)
store = Op(toy, "store", lambda place, value: NOTHING, effect=True)
wait = Op(toy, "wait", lambda *before: NOTHING, effect=True)
sine = Op(other, "sine", lambda a: a.type)

VECTOR = Array((4,), float32)
