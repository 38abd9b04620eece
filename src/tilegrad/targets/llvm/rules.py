"""How each elementwise Tile op becomes LLVM instructions: one table, one row per op.

Values are SSA names with an LLVM type; a row gets the Vectors that write it, the element DType and
the operands of one vector. Functions that no instruction computes (exp, tanh, ...) are
expanded through `tile.functions`. Invariant: low-precision floats are widened before they come
here (the lowering computes in float32), so rows see float32, float64, integers and bool. The
file is long because it is one table.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...core import dtype as dtypes
from ...core.dtype import DType
from ...core.errors import InternalError, UserError
from ...tile import division, functions
from ...tile.numeric import FUNCTIONS
from ...tile.scope import Element, Rare, where

I16, I32, I64, F32 = dtypes.int16, dtypes.int32, dtypes.int64, dtypes.float32
U16, U32, U64 = dtypes.uint16, dtypes.uint32, dtypes.uint64
SUFFIX = {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64"}


def scalar_type(dtype: DType) -> str:
    """The LLVM type of one element in a register; a narrow float is the integer of its bits."""
    if dtype.kind == "bool":
        return "i1"
    return {"float32": "float", "float64": "double"}.get(dtype.name, f"i{dtype.bits}")


def stored(dtype: DType) -> DType:
    """What an element is in memory: a bool and an int4 have a byte each."""
    return dtypes.int8 if dtype.kind == "bool" or dtype.bits < 8 else dtype


def memory_type(dtype: DType) -> str:
    """The LLVM type of one element in memory."""
    return scalar_type(stored(dtype))


def vector(element: str, lanes: int) -> str:
    """An LLVM vector type; one lane is a scalar."""
    return element if lanes == 1 else f"<{lanes} x {element}>"


def type_of(dtype: DType, lanes: int) -> str:
    """The LLVM type of so many elements in registers."""
    return vector(scalar_type(dtype), lanes)


def mangle(element: str, lanes: int) -> str:
    """The suffix of an intrinsic on the type."""
    base = SUFFIX.get(element, element)
    return base if lanes == 1 else f"v{lanes}{base}"


def literal(value: Any, dtype: DType) -> str:
    """One constant element."""
    if dtype.kind == "bool":
        return "true" if value else "false"
    if dtype.is_float:
        if dtype.bits >= 32:
            return "0x" + struct.pack(">d", float(dtype.numpy.type(value))).hex().upper()
        return str(int(dtype.numpy.type(value).view("uint16" if dtype.bits == 16 else "uint8")))
    return str(int(value))


def splat_constant(value: Any, dtype: DType, lanes: int) -> str:
    """A constant operand of a vector type."""
    one = literal(value, dtype)
    if lanes == 1:
        return one
    element = scalar_type(dtype)
    return f"splat ({element} {one})"


class Writer:
    """Lines of one function, fresh names, and the intrinsics it declares."""

    def __init__(self, native: frozenset[str] = frozenset()) -> None:
        self.native = native  # features of the Target, for conversions that may need a library
        self.lines: list[str] = []
        self.declared: dict[str, str] = {}
        self.defined: dict[str, str] = {}  # functions of the module's own, by name
        self.stack: list[str] = []  # lines that make room for values on the stack
        self.count = 0
        self.label = "entry"

    def name(self) -> str:
        """A fresh SSA name."""
        self.count += 1
        return f"%v{self.count}"

    def line(self, text: str) -> None:
        """One instruction."""
        self.lines.append("  " + text)

    def value(self, text: str) -> str:
        """One instruction that has a result."""
        name = self.name()
        self.lines.append(f"  {name} = {text}")
        return name

    def start(self, label: str) -> None:
        """Begin a basic block."""
        self.lines.append(f"{label}:")
        self.label = label

    def fresh_label(self, base: str) -> str:
        """A label no other block has."""
        self.count += 1
        return f"{base}{self.count}"

    def room(self, type_: str) -> str:
        """The address of room for a value, the same on every turn of a loop."""
        name = self.name()
        self.stack.append(f"  {name} = alloca {type_}, align 64")
        return name

    def shuffle(self, type_: str, a: str, b: str, lanes: Sequence[int]) -> str:
        """The lanes of two vectors of a type at some places."""
        shape = ", ".join(f"i32 {i}" for i in lanes)
        operands = f"{type_} {a}, {type_} {b}"
        return self.value(f"shufflevector {operands}, <{len(lanes)} x i32> <{shape}>")

    def only(
        self,
        mask: str,
        name: str,
        act: Callable[[], Any],
        type_: str = "",
        zero: str = "",
        rarely: bool = False,
    ) -> str:
        """Act where a scalar mask holds; what that gives, where it has a type, else zero."""
        yes, join = self.fresh_label(name), self.fresh_label("join")
        before, weights = self.label, ""
        if rarely:
            self.declared["!rare"] = '!0 = !{!"branch_weights", i32 1, i32 100000}'
            weights = ", !prof !0"
        self.line(f"br i1 {mask}, label %{yes}, label %{join}{weights}")
        self.start(yes)
        found = act()
        self.line(f"br label %{join}")
        self.start(join)
        incoming = f"[ {zero}, %{before} ], [ {found}, %{yes} ]"
        return self.value(f"phi {type_} {incoming}") if type_ else ""

    def loop(
        self,
        labels: Sequence[str],
        carried: Sequence[tuple[str, str, str]],
        going: Callable[[], str],
        turn: Callable[[], list[str]],
    ) -> None:
        """A loop that carries values (name, type, first): whether it goes on, and what they are
        after a turn."""
        (head, inside, done), before = labels, self.label
        self.line(f"br label %{head}")
        self.start(head)
        line = len(self.lines)
        self.lines.extend("" for _ in carried)  # written when the last label is known
        self.line(f"br i1 {going()}, label %{inside}, label %{done}")
        self.start(inside)
        for i, ((name, type_, first), last) in enumerate(zip(carried, turn())):
            pair = f"[ {first}, %{before} ], [ {last}, %{self.label} ]"
            self.lines[line + i] = f"  {name} = phi {type_} {pair}"
        self.line(f"br label %{head}")
        self.start(done)

    def intrinsic(self, name: str, result: str, *operands: tuple[str, str]) -> str:
        """Call an intrinsic, declaring it once; the type of an address may name its alignment."""
        types = ", ".join(t.partition(" align ")[0] for t, _ in operands)
        self.declared[name] = f"declare {result} @{name}({types})"
        arguments = ", ".join(f"{t} {v}" for t, v in operands)
        if result == "void":
            self.line(f"call void @{name}({arguments})")
            return ""
        return self.value(f"call {result} @{name}({arguments})")


@dataclass(eq=False)
class Vectors:
    """What rows and `tile.functions` compute with: LLVM instructions on vectors of some lanes."""

    clamps = frozenset[DType]()

    writer: Writer
    lanes: int
    near: bool = False  # no lane is ever far

    def type(self, dtype: DType | str) -> str:
        """The LLVM type of a vector of a dtype, or of a scalar type of LLVM's."""
        element = dtype if isinstance(dtype, str) else scalar_type(dtype)
        return vector(element, self.lanes)

    def constant(self, value: float, dtype: DType) -> str:
        """A number in every lane."""
        return splat_constant(value, dtype, self.lanes)

    def do(self, instruction: str, dtype: DType | str, *values: str) -> str:
        """One instruction whose operands have one type."""
        return self.writer.value(f"{instruction} {self.type(dtype)} {', '.join(values)}")

    def number(self, instruction: str, dtype: DType, x: str, value: int) -> str:
        """The same on a value and a number."""
        return self.do(instruction, dtype, x, self.constant(value, dtype))

    def select(self, mask: str, dtype: DType | str, a: str, b: str) -> str:
        """a where the mask holds, else b."""
        type_ = self.type(dtype)
        return self.writer.value(f"select {self.type('i1')} {mask}, {type_} {a}, {type_} {b}")

    def cast_as(self, how: str, x: str, source: DType | str, target: DType | str) -> str:
        """A value as another type: 'zext', 'bitcast', ..."""
        return self.writer.value(f"{how} {self.type(source)} {x} to {self.type(target)}")

    def call(self, name: str, dtype: DType, *operands: tuple[str, str]) -> str:
        """An intrinsic of the type."""
        full = f"llvm.{name}.{mangle(scalar_type(dtype), self.lanes)}"
        return self.writer.intrinsic(full, self.type(dtype), *operands)

    def apply(self, name: str, dtype: DType, *values: str) -> str:
        """A Tile op by its row; how far a shift goes needs no care here."""
        if name not in ("shift_left", "shift_right"):
            return ROWS[name](self, dtype, *values)
        right = "lshr" if dtype.kind == "uint" else "ashr"
        return self.do("shl" if name == "shift_left" else right, dtype, *values)

    def bitcast(self, x: str, source: DType, target: DType) -> str:
        """The same bits."""
        same = self.type(source) == self.type(target)
        return x if same else self.cast_as("bitcast", x, source, target)

    def convert(self, x: str, source: DType, target: DType) -> str:
        """The nearest number."""
        if source is target:
            return x
        if source.is_float and source.bits < 32:
            return self.convert(_widened(self, source, x), F32, target)
        if target.is_float and target.bits < 32:
            return _narrowed(self, target, self.convert(x, source, F32))
        if target.kind == "bool":
            return self.number("fcmp une" if source.is_float else "icmp ne", source, x, 0)
        if source.is_float and not target.is_float:
            return _float_to_integer(self, source, target, x)
        bits = 1 if source.kind == "bool" else source.bits
        if source.is_float:
            how = "fpext" if target.bits > bits else "fptrunc"
        elif target.is_float:
            how = "uitofp" if source.kind in ("uint", "bool") else "sitofp"
        elif target.bits == bits:
            return x
        elif target.bits < bits:
            how = "trunc"
        else:
            how = "sext" if source.kind == "int" else "zext"
        return self.cast_as(how, x, source, target)

    def repeat(
        self, going: Callable[[Element], Element], step: Callable[[Element], Element], x: Element
    ) -> Element:
        """A loop over one lane."""
        if self.lanes != 1:
            raise InternalError("llvm.rules", f"a loop over {self.lanes} lanes at once")
        w = self.writer
        labels = [w.fresh_label(n) for n in ("again", "turn", "enough")]
        current = Element(self, w.name(), x.dtype)
        carried = [(current.held, self.type(x.dtype), x.held)]
        w.loop(labels, carried, lambda: going(current).held, lambda: [step(current).held])
        return current

    def rarely(self, rare: Rare, *inputs: Element) -> Element:
        """done(near) for all lanes; where one is far, a call goes over them on the stack."""
        mask, *values = rare.near(*inputs)
        result = rare.done(*inputs, *values)
        if self.near:
            return result
        w, type_ = self.writer, self.type(result.dtype)
        some = self._any(mask, result.dtype.bits)

        def mended() -> str:
            rooms = [w.room(type_) for _ in (*inputs, result)]
            for value, place in zip((*inputs, result), rooms):
                w.line(f"store {type_} {value.held}, ptr {place}, align 64")
            function = self._out_of_line(rare, [i.dtype for i in inputs])
            arguments = ", ".join(f"ptr {place}" for place in rooms)
            w.line(f"call void @{function}({arguments}, i64 {self.lanes})")
            return w.value(f"load {type_}, ptr {rooms[-1]}, align 64")

        found = w.only(some, "far", mended, type_, result.held, rarely=True)
        return Element(self, found, result.dtype)

    def _any(self, mask: Element, bits: int) -> str:
        """Whether a mask over values of so many bits holds in any lane."""
        w, lanes = self.writer, self.lanes
        if lanes == 1:
            return mask.held
        if "avx512f" in w.native:  # where masks have registers of their own
            whole = w.value(f"bitcast <{lanes} x i1> {mask.held} to i{lanes}")
            return w.value(f"icmp ne i{lanes} {whole}, 0")
        v = vector(f"i{bits}", lanes)
        wide = w.value(f"sext <{lanes} x i1> {mask.held} to {v}")
        whole = w.intrinsic(f"llvm.vector.reduce.or.v{lanes}i{bits}", f"i{bits}", (v, wide))
        return w.value(f"icmp ne i{bits} {whole}, 0")

    def _out_of_line(self, rare: Rare, kinds: list[DType]) -> str:
        """A function of the module that goes over values one by one and mends the far ones."""
        outer, element = self.writer, scalar_type(kinds[0])
        full = f"far_{rare.name}_{SUFFIX[element]}"
        if full in outer.defined:
            return full
        w = Writer(outer.native)
        one, index = Vectors(w, 1), w.name()

        def turn() -> list[str]:
            inputs = []
            for i, kind in enumerate(kinds):
                place = w.value(f"getelementptr {element}, ptr %x{i}, i64 {index}")
                inputs.append(Element(one, w.value(f"load {element}, ptr {place}"), kind))

            def mend() -> None:
                result = rare.done(*inputs, *rare.far(*inputs))
                place = w.value(f"getelementptr {element}, ptr %y, i64 {index}")
                w.line(f"store {element} {result.held}, ptr {place}")

            w.only(rare.near(*inputs)[0].held, "mend", mend)
            return [w.value(f"add nuw i64 {index}, 1")]

        def going() -> str:
            return one.do("icmp ult", "i64", index, "%count")

        w.start("entry")
        w.loop(("each", "turn", "out"), [(index, "i64", "0")], going, turn)
        w.line("ret void")
        parameters = ", ".join(f"ptr noalias %x{i}" for i in range(len(kinds)))
        head = f"define internal void @{full}({parameters}, ptr noalias %y, i64 %count) #1 {{"
        outer.defined[full] = "\n".join([head, *w.lines, "}"])
        outer.declared.update(w.declared)
        return full


Row = Callable[..., str]  # of Vectors, the DType of the operands, and a value each


def _function(of_floats: Callable[..., Element], of_integers: Any = None) -> Row:
    """A row that is written over Elements; integers may have one of their own."""

    def row(m: Vectors, d: DType, *inputs: str) -> str:
        function = of_floats if d.is_float else of_integers or of_floats
        return str(function(*[Element(m, i, d) for i in inputs]).held)

    return row


def _pick(float_: str, signed: str, unsigned: str = "", boolean: str = "") -> Row:
    """A row that is one instruction, chosen by kind."""
    kinds = {"float": float_, "int": signed}
    kinds |= {"uint": unsigned or signed, "bool": boolean or signed}
    return lambda m, d, *inputs: m.do(kinds[d.kind], d, *inputs)


def _intrinsic(float_: str, signed: str = "", unsigned: str = "") -> Row:
    """A row that is one intrinsic, chosen by kind; where it has no name, the input itself."""

    def row(m: Vectors, d: DType, *inputs: str) -> str:
        name = {"float": float_, "int": signed, "uint": unsigned, "bool": unsigned}[d.kind]
        if not name:
            return inputs[0]
        extra = [("i1", "false")] if name == "abs" else []
        return m.call(name, d, *[(m.type(d), i) for i in inputs], *extra)

    return row


def _negative(m: Vectors, d: DType, x: str) -> str:
    return m.do("fneg", d, x) if d.is_float else m.do("sub", d, m.constant(0, d), x)


def _reciprocal(m: Vectors, d: DType, x: str) -> str:
    return m.do("fdiv", d, m.constant(1, d), x)


def _bit_not(m: Vectors, d: DType, x: str) -> str:
    return m.number("xor", d, x, True if d.kind == "bool" else -1)


def _raw(instruction: str, a: Element, b: Element | int) -> Element:
    """An instruction as it is."""
    m, right = a.machine, b if isinstance(b, Element) else a.constant(b)
    assert isinstance(m, Vectors)
    return Element(m, m.do(instruction, a.dtype, a.held, right.held), a.dtype)


def _shift(instruction: str) -> Row:
    def row(m: Vectors, d: DType, x: str, by: str) -> str:
        name = instruction if instruction == "shl" or d.kind != "uint" else "lshr"
        wide = m.number("icmp uge", d, by, d.bits)
        shifted = m.do(name, d, x, m.select(wide, d, m.constant(d.bits - 1, d), by))
        return shifted if name == "ashr" else m.select(wide, d, m.constant(0, d), shifted)

    return row


def _integer_power(a: Element, b: Element) -> Element:
    """Integer power by squaring over all bits of the exponent; a negative one gives 0 (or +-1)."""
    base, exponent, result, d = a, b, a.constant(1), a.dtype
    for _ in range(d.bits - (d.kind == "int")):
        result = where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = _raw("lshr", exponent, 1)
    if d.kind == "uint":
        return result
    negative, small = b < 0, where(a == 1, a.constant(1), 0)
    small = where(a == -1, result, small)  # -1 to an odd or even power
    return where(negative, small, result)


def _multiply_high(m: Vectors, d: DType, a: str, b: str) -> str:
    """The upper half of the unsigned product."""
    wide = f"i{2 * d.bits}"
    product = m.do("mul", wide, *[m.cast_as("zext", x, d, wide) for x in (a, b)])
    amount = str(d.bits) if m.lanes == 1 else f"splat ({wide} {d.bits})"
    high = m.do("lshr", wide, product, amount)
    return m.cast_as("trunc", high, wide, d)


def _pair_multiply_add(m: Vectors, d: DType, a: str, b: str, c: str) -> str:
    """Two lanes in a word are a GPU's: here they would be rounded twice."""
    raise UserError(
        "two narrow floats in a word are multiplied by GPUs alone",
        op="tile.pair_multiply_add",
        hint="take them apart, cast them to float32 and use multiply_add",
    )


def _multiply_add(m: Vectors, d: DType, a: str, b: str, c: str) -> str:
    if d.is_float:
        return _intrinsic("fma")(m, d, a, b, c)
    return ROWS["add"](m, d, ROWS["multiply"](m, d, a, b), c)


Dot = tuple[int, str, str, str]  # bits of a vector, feature, instruction, elements it takes
DOTS: tuple[Dot, ...] = (
    (512, "avx512vnni", "x86.avx512.vpdpbusd.512", "i32"),
    (512, "avx512bw", "x86.avx512.pmaddw.d.512", "i16"),
    (256, "avx512vnni", "x86.avx512.vpdpbusd.256", "i32"),
    (256, "avxvnni", "x86.avx512.vpdpbusd.256", "i32"),
    (256, "avx2", "x86.avx2.pmadd.wd", "i16"),
    (128, "sse2", "x86.sse2.pmadd.wd", "i16"),
    (128, "i8mm", "aarch64.neon.usdot.v4i32.v16i8", "i8"),
)
SIGNED_DOTS: tuple[Dot, ...] = ((128, "dotprod", "aarch64.neon.sdot.v4i32.v16i8", "i8"),)


def _byte_dot(m: Vectors, d: DType, a: str, b: str, total: str, dots: Sequence[Dot] = DOTS) -> str:
    """Four products of bytes: by the first instruction of a table that the Target has for so many,
    of parts where it has one for fewer, else byte by byte."""
    w, v, width = m.writer, m.type(I32), 32 * m.lanes
    known = [dot for dot in dots if dot[1] in w.native]
    for bits, _, name, element in known:
        if bits == width and element == "i16":
            return _byte_dot_pairs(m, a, b, total, f"llvm.{name}")
        if bits == width:
            s = vector(element, width // int(element[1:]))
            given = [x if s == v else w.value(f"bitcast {v} {x} to {s}") for x in (a, b)]
            return w.intrinsic(f"llvm.{name}", v, (v, total), *((s, x) for x in given))
    if any(bits < width for bits, *_ in known):
        part = partial(_byte_dot, dots=dots)
        return _by_halves(m, I32, I32, lambda half, *x: part(half, d, *x), a, b, total)
    return _byte_dot_plain(m, a, b, total, dots is SIGNED_DOTS)


def _by_halves(
    m: Vectors, source: DType, result: DType, row: Callable[..., str], *inputs: str
) -> str:
    """An op on two vectors of half as many lanes, and their results as one."""
    w, half, found = m.writer, Vectors(m.writer, m.lanes // 2), []
    for start in (0, half.lanes):
        lanes = range(start, start + half.lanes)
        found.append(row(half, *[w.shuffle(m.type(source), x, "poison", lanes) for x in inputs]))
    return w.shuffle(half.type(result), found[0], found[1], range(m.lanes))


def _byte_dot_pairs(m: Vectors, a: str, b: str, total: str, name: str) -> str:
    """Even and odd bytes as numbers of 16 bits; an instruction multiplies and adds two of them."""
    shorts, v, s = Vectors(m.writer, 2 * m.lanes), m.type(I32), vector("i16", 2 * m.lanes)
    short = m.writer.value(f"bitcast {v} {b} to {s}")
    words = Element(m, a, U32)
    for shift in (0, 8):
        even = (words >> 8 if shift else words) & 0x00FF00FF
        left = m.writer.value(f"bitcast {v} {even.held} to {s}")
        right = short if shift else shorts.number("shl", I16, short, 8)
        right = shorts.number("ashr", I16, right, 8)
        total = m.do("add", I32, total, m.writer.intrinsic(name, v, (s, left), (s, right)))
    return total


def _byte_dot_plain(m: Vectors, a: str, b: str, total: str, signed: bool) -> str:
    left, right = Element(m, a, I32 if signed else U32), Element(m, b, I32)
    found = Element(m, total, I32)
    for shift in (24, 16, 8, 0):
        first, second = ((x << shift if shift else x) >> 24 for x in (left, right))
        found = found + first * second
    return str(found.held)


def _byte_permute(m: Vectors, d: DType, a: str, b: str, chosen: str) -> str:
    """Four of eight bytes, one after the other."""
    low, high, digits = (Element(m, x, U32) for x in (a, b, chosen))
    low, high = low.to(U64), high.to(U64)
    word, total = low | high << 32, low
    for place in range(4):
        digit = ((digits >> 4 * place if place else digits) & 7) << 3
        byte = (word >> digit.to(U64)).to(U32) & 255
        total = total | byte << 8 * place if place else byte
    return str(total.held)


def _where(m: Vectors, d: DType, mask: str, a: str, b: str) -> str:
    return m.select(mask, d, a, b)


ROWS: dict[str, Row] = {
    "negative": _negative,
    "absolute": _intrinsic("fabs", "abs", ""),
    "square_root": _intrinsic("sqrt"),
    "reciprocal": _reciprocal,
    "sign": _function(functions.sign),
    "floor": _intrinsic("floor"),
    "ceil": _intrinsic("ceil"),
    "round": _intrinsic("rint"),
    "trunc": _intrinsic("trunc"),
    "bit_not": _bit_not,
    "add": _pick("fadd", "add", boolean="or"),
    "subtract": _pick("fsub", "sub", boolean="xor"),
    "multiply": _pick("fmul", "mul", boolean="and"),
    "divide": _function(partial(_raw, "fdiv"), partial(division.divide, _raw)),
    **{
        name: _function(getattr(functions, name), partial(getattr(division, name), _raw))
        for name in ("floor_divide", "remainder", "fmod")
    },
    "unsigned_divide": _function(partial(division.unsigned_divide, _raw)),
    "unsigned_remainder": _function(partial(division.unsigned_remainder, _raw)),
    "power": _function(functions.power, _integer_power),
    "maximum": _intrinsic("maximum", "smax", "umax"),
    "minimum": _intrinsic("minimum", "smin", "umin"),
    "bit_and": _pick("and", "and"),
    "bit_or": _pick("or", "or"),
    "bit_xor": _pick("xor", "xor"),
    "shift_left": _shift("shl"),
    "shift_right": _shift("ashr"),
    "multiply_high": _multiply_high,
    "equal": _pick("fcmp oeq", "icmp eq"),
    "not_equal": _pick("fcmp une", "icmp ne"),
    "less": _pick("fcmp olt", "icmp slt", "icmp ult", "icmp ult"),
    "less_equal": _pick("fcmp ole", "icmp sle", "icmp ule", "icmp ule"),
    "where": _where,
    "multiply_add": _multiply_add,
    "byte_dot": _byte_dot,
    "signed_byte_dot": partial(_byte_dot, dots=SIGNED_DOTS),
    "byte_permute": _byte_permute,
    "pair_multiply_add_bfloat16": _pair_multiply_add,
    "pair_multiply_add_float16": _pair_multiply_add,
}
ROWS |= {name: _function(getattr(functions, name)) for name in FUNCTIONS}
ROWS |= {f"quick_{name}": ROWS[name] for name in ("divide", "exp", "exp2", "reciprocal")}


HALF = frozenset({"f16c", "avx512f", "neon", "fullfp16"})  # any of these converts float16


def _float_to_integer(m: Vectors, source: DType, target: DType, x: str) -> str:
    """Truncate through a wide signed integer, so that out-of-range values wrap as in C."""
    wide = I64 if target.bits >= 32 and target is not I32 else I32
    kinds = f"{mangle(scalar_type(wide), m.lanes)}.{mangle(scalar_type(source), m.lanes)}"
    whole = m.writer.intrinsic(f"llvm.fptosi.sat.{kinds}", m.type(wide), (m.type(source), x))
    return m.convert(whole, wide, target)


def _from_float8(m: Vectors, source: DType, x: str) -> str:
    """Widen fp8: shift into a float16 (e5m2), or rebuild the exponent (e4m3)."""
    bits = Element(m, x, dtypes.uint8).to(U16)
    if source is dtypes.float8_e5m2:
        return _half_bits(m, (bits << 8).held)
    # e4m3: sign | 4 exponent | 3 mantissa; as half with bias 15, value * 2**8
    sign, rest = bits & 128, bits & 127
    wide = _half_bits(m, (sign << 8 | rest << 7).held)
    scaled = Element(m, wide, F32) * 256.0
    return str(where(rest == 127, math.nan, scaled).held)


def _half_bits(m: Vectors, bits: str) -> str:
    """The float32 of a float16 that has these bits."""
    return m.cast_as("fpext", m.cast_as("bitcast", bits, I16, "half"), "half", F32)


def _test(m: Vectors, how: str, x: Element, limit: int) -> Element:
    """A comparison of integers by its name."""
    return Element(m, m.number(f"icmp {how}", x.dtype, x.held, limit), dtypes.bool_)


NARROW = {  # mantissa bits, exponent bias, the first value past the largest, a nan
    "float8_e5m2": (2, 15, 0x7C, 0x7F),
    "float8_e4m3": (3, 7, 0x7F, 0x7F),
    "float16": (10, 15, 0x7C00, 0x7E00),
    "bfloat16": (7, 127, 0x7F80, 0x7FC0),
}


def _widened(m: Vectors, source: DType, x: str) -> str:
    """A narrow float as float32."""
    if source.bits == 8:
        return _from_float8(m, source, x)
    if source is dtypes.bfloat16:
        return str((Element(m, x, U16).to(U32) << 16).as_float().held)
    return _half_bits(m, x) if m.writer.native & HALF else _from_half(m, x)


def _narrowed(m: Vectors, target: DType, x: str) -> str:
    """Round float32 to a narrow float, by an instruction where the Target has one. To bfloat16 at
    most a register at a time: LLVM fails an assertion on 32 lanes of which a masked store, with a
    mask it knows, takes no more than 16."""
    brief, native = target is dtypes.bfloat16, m.writer.native
    if target.bits == 8 or not ("avx512bf16" in native if brief else native & HALF):
        return _to_narrow(m, target, x)
    if brief and m.lanes > 16 and m.lanes % 2 == 0:
        return _by_halves(m, F32, I16, lambda half, part: _narrowed(half, target, part), x)
    kind = "bfloat" if brief else "half"
    return m.cast_as("bitcast", m.cast_as("fptrunc", x, F32, kind), kind, I16)


def _from_half(m: Vectors, x: str) -> str:
    """Widen float16 with integer operations: the exponent is moved by a product."""
    bits = Element(m, x, U16).to(U32)
    sign = (bits & 0x8000) << 16
    body = bits & 0x7FFF
    shifted = body << 13
    number = (shifted.as_float() * 2.0**112).bits
    special = _test(m, "uge", body, 0x7C00)
    full = where(special, shifted | 0x7F800000, number) | sign
    return str(full.as_float().held)


def _to_narrow(m: Vectors, target: DType, x: str) -> str:
    """Round float32 to a narrower float, half to even, with the rule of ml_dtypes (past the
    largest: infinity, or nan where there is none)."""
    mantissa, bias, top, nan = NARROW[target.name]
    bits = Element(m, x, F32).seen_as(U32)
    sign = (bits >> 32 - target.bits) & (1 << target.bits - 1)
    magnitude = bits & 0x7FFFFFFF
    # normal: add half an ulp (to even), shift, rebias
    drop = 23 - mantissa
    last = (magnitude >> drop) & 1
    rounded = magnitude + ((1 << drop - 1) - 1)
    normal = ((rounded + last) >> drop) - ((127 - bias) << mantissa)
    # subnormal: let the float adder round by adding a power of two of the right size
    magic = (127 + (1 - bias) + 23 - mantissa) << 23
    shifted = magnitude.as_float() + magnitude.constant(magic).as_float()
    small = shifted.seen_as(U32) - magic
    value = where(magnitude < (128 - bias) << 23, small, normal)
    big = where(_test(m, "uge", value, top), top, value)
    big = where(_test(m, "ugt", magnitude, 0x7F800000), nan, big)
    return str((big | sign).to(U16 if target.bits == 16 else dtypes.uint8).held)
