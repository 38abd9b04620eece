"""How each elementwise Tile op becomes LLVM instructions: one table, one row per op.

Values are SSA names with an LLVM type; a row gets the writer, the element DType, the lane count
and the operands of one vector. Functions that no instruction computes (exp, tanh, ...) are
expanded through `tile.functions`. Invariant: low-precision floats are widened before they come
here (the lowering computes in float32), so rows see float32, float64, integers and bool. The
file is long because it is one table.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ...core import dtype as dtypes
from ...core.dtype import DType
from ...core.errors import InternalError
from ...tile import functions
from ...tile.numeric import FUNCTIONS
from ...tile.scope import Element

SCALARS = {
    "bool": "i1",
    "int8": "i8",
    "uint8": "i8",
    "int16": "i16",
    "uint16": "i16",
    "int32": "i32",
    "uint32": "i32",
    "int64": "i64",
    "uint64": "i64",
    "float16": "i16",
    "bfloat16": "i16",
    "float32": "float",
    "float64": "double",
    "float8_e4m3": "i8",
    "float8_e5m2": "i8",
    "int4": "i4",
}
SUFFIX = {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64"}


def scalar_type(dtype: DType) -> str:
    """The LLVM type of one element in a register."""
    return SCALARS[dtype.name]


def memory_type(dtype: DType) -> str:
    """The LLVM type of one element in memory (a bool and an int4 have a byte each)."""
    return "i8" if dtype.kind == "bool" or dtype.bits < 8 else SCALARS[dtype.name]


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
        if dtype is dtypes.float64:
            return "0x" + struct.pack(">d", float(value)).hex().upper()
        if dtype is dtypes.float32:
            rounded = float(dtypes.float32.numpy.type(value))
            return "0x" + struct.pack(">d", rounded).hex().upper()
        return str(int(dtype.numpy.type(value).view("uint16" if dtype.bits == 16 else "uint8")))
    return str(int(value))


def splat_constant(value: Any, dtype: DType, lanes: int) -> str:
    """A constant operand of a vector type."""
    one = literal(value, dtype)
    if lanes == 1:
        return one
    element = scalar_type(dtype)
    return f"splat ({element} {one})"


def _splat(value: int, lanes: int, bits: int = 32) -> str:
    """A number as the bits of every lane."""
    return str(value) if lanes == 1 else f"splat (i{bits} {value})"


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

    def intrinsic(self, name: str, result: str, *operands: tuple[str, str]) -> str:
        """Call an intrinsic, declaring it once."""
        types = ", ".join(t for t, _ in operands)
        self.declared[name] = f"declare {result} @{name}({types})"
        arguments = ", ".join(f"{t} {v}" for t, v in operands)
        if result == "void":
            self.line(f"call void @{name}({arguments})")
            return ""
        return self.value(f"call {result} @{name}({arguments})")


class VectorMachine:
    """What `tile.functions` compute with, as LLVM instructions on vectors of so many lanes."""

    clamps: frozenset[DType] = frozenset()

    def __init__(self, writer: Writer, lanes: int, near: bool = False) -> None:
        self.writer, self.lanes = writer, lanes
        self.near = near  # no lane is ever far

    def _type(self, dtype: DType) -> str:
        return type_of(dtype, self.lanes)

    def constant(self, value: float, dtype: DType) -> str:
        """A number in every lane."""
        return splat_constant(value, dtype, self.lanes)

    def apply(self, name: str, dtype: DType, *values: str) -> str:
        """A Tile op by its row; how far a shift goes needs no care here."""
        if name not in ("shift_left", "shift_right"):
            return ROWS[name](self.writer, dtype, self.lanes, list(values))
        right = "lshr" if dtype.kind == "uint" else "ashr"
        instruction = "shl" if name == "shift_left" else right
        return self.writer.value(f"{instruction} {self._type(dtype)} {values[0]}, {values[1]}")

    def bitcast(self, x: str, source: DType, target: DType) -> str:
        """The same bits."""
        a, b = self._type(source), self._type(target)
        return x if a == b else self.writer.value(f"bitcast {a} {x} to {b}")

    def convert(self, x: str, source: DType, target: DType) -> str:
        """The nearest number."""
        return convert(self.writer, source, target, self.lanes, x)

    def repeat(
        self, going: Callable[[Element], Element], step: Callable[[Element], Element], x: Element
    ) -> Element:
        """A loop over one lane."""
        if self.lanes != 1:
            raise InternalError("llvm.rules", f"a loop over {self.lanes} lanes at once")
        w, type_ = self.writer, self._type(x.dtype)
        head, inside, out = (w.fresh_label(n) for n in ("again", "turn", "enough"))
        before = w.label
        w.line(f"br label %{head}")
        w.start(head)
        current = Element(self, w.name(), x.dtype)
        slot = len(w.lines)
        w.line("")  # the phi, written when the last label is known
        w.line(f"br i1 {going(current).held}, label %{inside}, label %{out}")
        w.start(inside)
        following = step(current)
        pair = f"[ {x.held}, %{before} ], [ {following.held}, %{w.label} ]"
        w.lines[slot] = f"  {current.held} = phi {type_} {pair}"
        w.line(f"br label %{head}")
        w.start(out)
        return current

    def rarely(
        self,
        name: str,
        near: Callable[..., Any],
        far: Callable[..., Any],
        done: Callable[..., Element],
        *inputs: Element,
    ) -> Element:
        """done(near) for all lanes; where one is far, a call goes over them on the stack."""
        mask, *values = near(*inputs)
        result = done(*inputs, *values)
        if self.near:
            return result
        w, type_ = self.writer, self._type(result.dtype)
        some = self._any(mask, result.dtype.bits)
        cold, join = w.fresh_label("far"), w.fresh_label("joined")
        before = w.label
        w.declared["!rare"] = '!0 = !{!"branch_weights", i32 1, i32 100000}'
        w.line(f"br i1 {some}, label %{cold}, label %{join}, !prof !0")
        w.start(cold)
        places = [w.room(type_) for _ in (*inputs, result)]
        for value, place in zip((*inputs, result), places):
            w.line(f"store {type_} {value.held}, ptr {place}, align 64")
        function = self._out_of_line(name, near, far, done, [i.dtype for i in inputs])
        arguments = ", ".join(f"ptr {place}" for place in places)
        w.line(f"call void @{function}({arguments}, i64 {self.lanes})")
        mended = w.value(f"load {type_}, ptr {places[-1]}, align 64")
        w.line(f"br label %{join}")
        w.start(join)
        both = f"[ {result.held}, %{before} ], [ {mended}, %{cold} ]"
        return Element(self, w.value(f"phi {type_} {both}"), result.dtype)

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

    def _out_of_line(
        self,
        name: str,
        near: Callable[..., Any],
        far: Callable[..., Any],
        done: Callable[..., Element],
        kinds: list[DType],
    ) -> str:
        """A function of the module that goes over values one by one and mends the far ones."""
        outer, element = self.writer, scalar_type(kinds[0])
        full = f"far_{name}_{SUFFIX[element]}"
        if full in outer.defined:
            return full
        w = Writer(outer.native)
        one = VectorMachine(w, 1)
        w.start("entry")
        w.line("br label %each")
        w.start("each")
        index, following = "%index", "%following"
        w.line(f"{index} = phi i64 [ 0, %entry ], [ {following}, %next ]")
        inputs = []
        for i, kind in enumerate(kinds):
            place = w.value(f"getelementptr {element}, ptr %x{i}, i64 {index}")
            inputs.append(Element(one, w.value(f"load {element}, ptr {place}"), kind))
        mask = near(*inputs)[0]
        w.line(f"br i1 {mask.held}, label %mend, label %next")
        w.start("mend")
        result = done(*inputs, *far(*inputs))
        place = w.value(f"getelementptr {element}, ptr %y, i64 {index}")
        w.line(f"store {element} {result.held}, ptr {place}")
        w.line("br label %next")
        w.start("next")
        w.line(f"{following} = add nuw i64 {index}, 1")
        going = w.value(f"icmp ult i64 {following}, %count")
        w.line(f"br i1 {going}, label %each, label %out")
        w.start("out")
        w.line("ret void")
        parameters = ", ".join(f"ptr noalias %x{i}" for i in range(len(kinds)))
        head = f"define internal void @{full}({parameters}, ptr noalias %y, i64 %count) #1 {{"
        outer.defined[full] = "\n".join([head, *w.lines, "}"])
        outer.declared.update(w.declared)
        return full


Row = Callable[[Writer, DType, int, list[str]], str]


def _function(name: str, near: bool = False) -> Row:
    """A row that expands `tile.functions.<name>`."""

    def row(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
        machine = VectorMachine(w, lanes, near)
        return str(getattr(functions, name)(*[Element(machine, i, d) for i in inputs]).held)

    return row


def _pick(float_: str, signed: str, unsigned: str | None = None, boolean: str | None = None) -> Row:
    """A row that is one two-operand instruction, chosen by kind."""

    def row(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
        kinds = {
            "float": float_,
            "int": signed,
            "uint": unsigned or signed,
            "bool": boolean or signed,
        }
        return w.value(f"{kinds[d.kind]} {type_of(d, lanes)} {inputs[0]}, {inputs[1]}")

    return row


def _intrinsic(float_: str, signed: str = "", unsigned: str = "") -> Row:
    """A row that is one intrinsic, chosen by kind; where it has no name, the input itself."""

    def row(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
        name = {"float": float_, "int": signed, "uint": unsigned, "bool": unsigned}[d.kind]
        if not name:
            return inputs[0]
        type_ = type_of(d, lanes)
        extra = [("i1", "false")] if name == "abs" else []
        operands = [(type_, i) for i in inputs] + extra
        return w.intrinsic(f"llvm.{name}.{mangle(scalar_type(d), lanes)}", type_, *operands)

    return row


def _negative(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
    type_ = type_of(d, lanes)
    if d.is_float:
        return w.value(f"fneg {type_} {inputs[0]}")
    return w.value(f"sub {type_} {splat_constant(0, d, lanes)}, {inputs[0]}")


def _reciprocal(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
    one = splat_constant(1, d, lanes)
    return w.value(f"fdiv {type_of(d, lanes)} {one}, {inputs[0]}")


def _bit_not(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
    ones = True if d.kind == "bool" else -1
    mask = splat_constant(ones, d, lanes)
    return w.value(f"xor {type_of(d, lanes)} {inputs[0]}, {mask}")


def _sign(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
    x, type_ = inputs[0], type_of(d, lanes)
    if d.kind == "bool":
        return x
    zero = splat_constant(0, d, lanes)
    mask = vector("i1", lanes)
    compare = "fcmp ogt" if d.is_float else ("icmp ugt" if d.kind == "uint" else "icmp sgt")
    above = w.value(f"{compare} {type_} {x}, {zero}")
    one, minus = splat_constant(1, d, lanes), splat_constant(-1, d, lanes)
    if d.kind == "uint":
        return w.value(f"select {mask} {above}, {type_} {one}, {type_} {zero}")
    below = w.value(f"{'fcmp olt' if d.is_float else 'icmp slt'} {type_} {x}, {zero}")
    rest = x if d.is_float else zero  # nan and signed zero stay themselves
    low = w.value(f"select {mask} {below}, {type_} {minus}, {type_} {rest}")
    return w.value(f"select {mask} {above}, {type_} {one}, {type_} {low}")


def _divide(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
    """Division; of integers truncated, and a zero divisor (a masked lane) gives 0, no trap."""
    if d.is_float:
        return w.value(f"fdiv {type_of(d, lanes)} {inputs[0]}, {inputs[1]}")
    quotient, _, _, zero_divisor = _division(w, d, lanes, inputs)
    type_, zero = type_of(d, lanes), splat_constant(0, d, lanes)
    return w.value(
        f"select {vector('i1', lanes)} {zero_divisor}, {type_} {zero}, {type_} {quotient}"
    )


def _unsigned_division(instruction: str) -> Row:
    """udiv or urem of operands seen as unsigned; a zero divisor gives 0."""

    def row(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
        type_, mask = type_of(d, lanes), vector("i1", lanes)
        zero, one = splat_constant(0, d, lanes), splat_constant(1, d, lanes)
        bad = w.value(f"icmp eq {type_} {inputs[1]}, {zero}")
        safe = w.value(f"select {mask} {bad}, {type_} {one}, {type_} {inputs[1]}")
        result = w.value(f"{instruction} {type_} {inputs[0]}, {safe}")
        if instruction == "urem":
            return result  # by 1, that is 0
        return w.value(f"select {mask} {bad}, {type_} {zero}, {type_} {result}")

    return row


def _divide_floor(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
    """Division rounded down; a zero divisor of integers gives 0."""
    if d.is_float:
        return _function("floor_divide")(w, d, lanes, inputs)
    quotient, remainder, divisor, zero_divisor = _division(w, d, lanes, inputs)
    type_, mask = type_of(d, lanes), vector("i1", lanes)
    zero = splat_constant(0, d, lanes)
    if d.kind == "int":
        adjust = _signs_differ(w, d, lanes, remainder, divisor)
        less = w.value(f"sub {type_} {quotient}, {splat_constant(1, d, lanes)}")
        quotient = w.value(f"select {mask} {adjust}, {type_} {less}, {type_} {quotient}")
    return w.value(f"select {mask} {zero_divisor}, {type_} {zero}, {type_} {quotient}")


def _division(w: Writer, d: DType, lanes: int, inputs: list[str]) -> tuple[str, str, str, str]:
    type_, mask = type_of(d, lanes), vector("i1", lanes)
    zero, one = splat_constant(0, d, lanes), splat_constant(1, d, lanes)
    zero_divisor = w.value(f"icmp eq {type_} {inputs[1]}, {zero}")
    safe = w.value(f"select {mask} {zero_divisor}, {type_} {one}, {type_} {inputs[1]}")
    letter = "u" if d.kind == "uint" else "s"
    if letter == "s":  # the smallest integer by -1 would trap: divide it by 1 instead
        lowest = splat_constant(d.lowest, d, lanes)
        minus = splat_constant(-1, d, lanes)
        a = w.value(f"icmp eq {type_} {inputs[0]}, {lowest}")
        b = w.value(f"icmp eq {type_} {safe}, {minus}")
        both = w.value(f"and {mask} {a}, {b}")
        safe = w.value(f"select {mask} {both}, {type_} {one}, {type_} {safe}")
    quotient = w.value(f"{letter}div {type_} {inputs[0]}, {safe}")
    product = w.value(f"mul {type_} {quotient}, {safe}")
    remainder = w.value(f"sub {type_} {inputs[0]}, {product}")
    return quotient, remainder, safe, zero_divisor


def _signs_differ(w: Writer, d: DType, lanes: int, remainder: str, divisor: str) -> str:
    """Whether a non-zero remainder has another sign than the divisor."""
    type_, mask = type_of(d, lanes), vector("i1", lanes)
    zero = splat_constant(0, d, lanes)
    crossed = w.value(f"xor {type_} {remainder}, {divisor}")
    negative = w.value(f"icmp slt {type_} {crossed}, {zero}")
    some = w.value(f"icmp ne {type_} {remainder}, {zero}")
    return w.value(f"and {mask} {negative}, {some}")


def _remainder(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
    type_, mask = type_of(d, lanes), vector("i1", lanes)
    if d.is_float:
        return _function("remainder")(w, d, lanes, inputs)
    _, remainder, divisor, zero_divisor = _division(w, d, lanes, inputs)
    if d.kind == "int":
        adjust = _signs_differ(w, d, lanes, remainder, divisor)
        more = w.value(f"add {type_} {remainder}, {divisor}")
        remainder = w.value(f"select {mask} {adjust}, {type_} {more}, {type_} {remainder}")
    zero = splat_constant(0, d, lanes)
    return w.value(f"select {mask} {zero_divisor}, {type_} {zero}, {type_} {remainder}")


def _fmod(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
    """The remainder with the sign of the dividend; 0 of a zero divisor of integers."""
    if d.is_float:
        return _function("fmod")(w, d, lanes, inputs)
    return _division(w, d, lanes, inputs)[1]  # a zero divisor was taken for 1


def _shift(instruction: str) -> Row:
    def row(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
        name = instruction if instruction == "shl" or d.kind != "uint" else "lshr"
        type_, mask = type_of(d, lanes), vector("i1", lanes)
        wide = w.value(f"icmp uge {type_} {inputs[1]}, {splat_constant(d.bits, d, lanes)}")
        limit = splat_constant(d.bits - 1, d, lanes)
        amount = w.value(f"select {mask} {wide}, {type_} {limit}, {type_} {inputs[1]}")
        shifted = w.value(f"{name} {type_} {inputs[0]}, {amount}")
        if name == "ashr":
            return shifted
        zero = splat_constant(0, d, lanes)
        return w.value(f"select {mask} {wide}, {type_} {zero}, {type_} {shifted}")

    return row


def _compare(name: str) -> Row:
    float_ = {"equal": "oeq", "not_equal": "une", "less": "olt", "less_equal": "ole"}[name]
    signed = {"equal": "eq", "not_equal": "ne", "less": "slt", "less_equal": "sle"}[name]
    unsigned = {"slt": "ult", "sle": "ule"}.get(signed, signed)
    return _pick(f"fcmp {float_}", f"icmp {signed}", f"icmp {unsigned}", f"icmp {unsigned}")


def _integer_power(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
    """Integer power by squaring over all bits of the exponent; a negative one gives 0 (or +-1)."""
    if d.is_float:
        return _function("power")(w, d, lanes, inputs)
    type_, mask = type_of(d, lanes), vector("i1", lanes)
    zero, one = splat_constant(0, d, lanes), splat_constant(1, d, lanes)
    base, exponent, result = inputs[0], inputs[1], one
    for _ in range(d.bits - (d.kind == "int")):
        bit = w.value(f"and {type_} {exponent}, {one}")
        odd = w.value(f"icmp ne {type_} {bit}, {zero}")
        more = w.value(f"mul {type_} {result}, {base}")
        result = w.value(f"select {mask} {odd}, {type_} {more}, {type_} {result}")
        base = w.value(f"mul {type_} {base}, {base}")
        exponent = w.value(f"lshr {type_} {exponent}, {one}")
    if d.kind == "uint":
        return result
    negative = w.value(f"icmp slt {type_} {inputs[1]}, {zero}")
    minus = splat_constant(-1, d, lanes)
    small = zero
    for unit, value in ((one, one), (minus, result)):  # -1 to an odd or even power
        is_unit = w.value(f"icmp eq {type_} {inputs[0]}, {unit}")
        small = w.value(f"select {mask} {is_unit}, {type_} {value}, {type_} {small}")
    return w.value(f"select {mask} {negative}, {type_} {small}, {type_} {result}")


def _multiply_high(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
    """The upper half of the unsigned product."""
    narrow, wide = scalar_type(d), f"i{2 * d.bits}"
    n, x = vector(narrow, lanes), vector(wide, lanes)
    a = w.value(f"zext {n} {inputs[0]} to {x}")
    b = w.value(f"zext {n} {inputs[1]} to {x}")
    product = w.value(f"mul {x} {a}, {b}")
    high = w.value(f"lshr {x} {product}, {_splat(d.bits, lanes, 2 * d.bits)}")
    return w.value(f"trunc {x} {high} to {n}")


def _multiply_add(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
    if d.is_float:
        return _intrinsic("fma")(w, d, lanes, inputs)
    product = ROWS["multiply"](w, d, lanes, inputs[:2])
    return ROWS["add"](w, d, lanes, [product, inputs[2]])


def _byte_dot(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
    """Four products of bytes: one instruction where the Target has it, two of pairs of 16 bits
    where it has those, else byte by byte."""
    v, width = vector("i32", lanes), 32 * lanes
    vnni = {512: "avx512vnni" in w.native, 256: bool(w.native & {"avx512vnni", "avxvnni"})}
    pairs = {
        512: ("avx512bw", "avx512.pmaddw.d.512"),
        256: ("avx2", "avx2.pmadd.wd"),
        128: ("sse2", "sse2.pmadd.wd"),
    }
    if vnni.get(width):
        a, b, total = inputs
        return w.intrinsic(f"llvm.x86.avx512.vpdpbusd.{width}", v, (v, total), (v, a), (v, b))
    feature, name = pairs.get(width, ("", ""))
    if feature in w.native and not (width == 512 and vnni[256]):
        return _byte_dot_pairs(w, lanes, inputs, f"llvm.x86.{name}")
    if width > 128 and lanes % 2 == 0 and w.native & {"sse2", "avx2", "avxvnni"}:
        return _byte_dot_halves(w, d, lanes, inputs)
    return _byte_dot_plain(w, lanes, inputs)


def _byte_dot_halves(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
    """Two vectors of half as many lanes."""
    v, half, found = vector("i32", lanes), lanes // 2, []
    for start in (0, half):
        places = ", ".join(f"i32 {start + i}" for i in range(half))
        parts = [
            w.value(f"shufflevector {v} {x}, {v} poison, <{half} x i32> <{places}>") for x in inputs
        ]
        found.append(_byte_dot(w, d, half, parts))
    places, h = ", ".join(f"i32 {i}" for i in range(lanes)), vector("i32", half)
    return w.value(f"shufflevector {h} {found[0]}, {h} {found[1]}, <{lanes} x i32> <{places}>")


def _byte_dot_pairs(w: Writer, lanes: int, inputs: list[str], name: str) -> str:
    """Even and odd bytes as numbers of 16 bits; an instruction multiplies and adds two of them."""
    v, s = vector("i32", lanes), vector("i16", 2 * lanes)
    a, b, total = inputs
    short = w.value(f"bitcast {v} {b} to {s}")
    eight = "splat (i16 8)"
    for shift in (0, 8):
        left = w.value(f"lshr {v} {a}, {_splat(8, lanes)}") if shift else a
        left = w.value(f"and {v} {left}, {_splat(0x00FF00FF, lanes)}")
        left = w.value(f"bitcast {v} {left} to {s}")
        right = short if shift else w.value(f"shl {s} {short}, {eight}")
        right = w.value(f"ashr {s} {right}, {eight}")
        product = w.intrinsic(name, v, (s, left), (s, right))
        total = w.value(f"add {v} {total}, {product}")
    return total


def _byte_dot_plain(w: Writer, lanes: int, inputs: list[str]) -> str:
    v = vector("i32", lanes)
    a, b, total = inputs
    for shift in (0, 8, 16, 24):
        left = a if not shift else w.value(f"lshr {v} {a}, {_splat(shift, lanes)}")
        if shift < 24:
            left = w.value(f"and {v} {left}, {_splat(255, lanes)}")
        right = b if shift == 24 else w.value(f"shl {v} {b}, {_splat(24 - shift, lanes)}")
        right = w.value(f"ashr {v} {right}, {_splat(24, lanes)}")
        product = w.value(f"mul {v} {left}, {right}")
        total = w.value(f"add {v} {total}, {product}")
    return total


def _byte_permute(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
    """Four of eight bytes, one after the other."""
    narrow, wide = vector("i32", lanes), vector("i64", lanes)
    low, high = (w.value(f"zext {narrow} {x} to {wide}") for x in inputs[:2])
    both = w.value(f"shl {wide} {high}, {_splat(32, lanes, 64)}")
    both = w.value(f"or {wide} {low}, {both}")
    total = ""
    for place in range(4):
        digit = (
            inputs[2]
            if not place
            else w.value(f"lshr {narrow} {inputs[2]}, {_splat(4 * place, lanes)}")
        )
        digit = w.value(f"and {narrow} {digit}, {_splat(7, lanes)}")
        digit = w.value(f"shl {narrow} {digit}, {_splat(3, lanes)}")
        by = w.value(f"zext {narrow} {digit} to {wide}")
        byte = w.value(f"trunc {wide} {w.value(f'lshr {wide} {both}, {by}')} to {narrow}")
        byte = w.value(f"and {narrow} {byte}, {_splat(255, lanes)}")
        if place:
            byte = w.value(f"shl {narrow} {byte}, {_splat(8 * place, lanes)}")
        total = w.value(f"or {narrow} {total}, {byte}") if total else byte
    return total


def _where(w: Writer, d: DType, lanes: int, inputs: list[str]) -> str:
    type_ = type_of(d, lanes)
    return w.value(
        f"select {vector('i1', lanes)} {inputs[0]}, {type_} {inputs[1]}, {type_} {inputs[2]}"
    )


ROWS: dict[str, Row] = {
    "negative": _negative,
    "absolute": _intrinsic("fabs", "abs", ""),
    "square_root": _intrinsic("sqrt"),
    "reciprocal": _reciprocal,
    "quick_reciprocal": _reciprocal,
    "sign": _sign,
    "floor": _intrinsic("floor"),
    "ceil": _intrinsic("ceil"),
    "round": _intrinsic("rint"),
    "trunc": _intrinsic("trunc"),
    "bit_not": _bit_not,
    "add": _pick("fadd", "add", boolean="or"),
    "subtract": _pick("fsub", "sub", boolean="xor"),
    "multiply": _pick("fmul", "mul", boolean="and"),
    "divide": _divide,
    "quick_divide": _divide,
    "floor_divide": _divide_floor,
    "remainder": _remainder,
    "fmod": _fmod,
    "unsigned_divide": _unsigned_division("udiv"),
    "unsigned_remainder": _unsigned_division("urem"),
    "power": _integer_power,
    "maximum": _intrinsic("maximum", "smax", "umax"),
    "minimum": _intrinsic("minimum", "smin", "umin"),
    "bit_and": _pick("and", "and"),
    "bit_or": _pick("or", "or"),
    "bit_xor": _pick("xor", "xor"),
    "shift_left": _shift("shl"),
    "shift_right": _shift("ashr"),
    "multiply_high": _multiply_high,
    "equal": _compare("equal"),
    "not_equal": _compare("not_equal"),
    "less": _compare("less"),
    "less_equal": _compare("less_equal"),
    "where": _where,
    "multiply_add": _multiply_add,
    "byte_dot": _byte_dot,
    "byte_permute": _byte_permute,
}
ROWS |= {name: _function(name) for name in FUNCTIONS}
NEAR = {name: _function(name, near=True) for name in ("sin", "cos", "tan")}
ROWS["quick_exp"], ROWS["quick_exp2"] = ROWS["exp"], ROWS["exp2"]


HALF = frozenset({"f16c", "avx512f", "neon", "fullfp16"})  # any of these converts float16


def convert(w: Writer, source: DType, target: DType, lanes: int, x: str) -> str:
    """Convert one vector between dtypes."""
    if source is target:
        return x
    if source.is_float and source.bits == 8:
        return convert(w, dtypes.float32, target, lanes, _from_float8(w, source, lanes, x))
    if target.is_float and target.bits == 8:
        return _to_narrow(w, target, lanes, convert(w, source, dtypes.float32, lanes, x))
    a, b = type_of(source, lanes), type_of(target, lanes)
    if source.is_float and source.bits == 16:
        return convert(w, dtypes.float32, target, lanes, _from_narrow(w, source, lanes, x))
    if target.kind == "bool":
        zero = splat_constant(0, source, lanes)
        return w.value(f"{'fcmp une' if source.is_float else 'icmp ne'} {a} {x}, {zero}")
    if target.is_float and target.bits == 16:
        return _to_16(w, target, lanes, convert(w, source, dtypes.float32, lanes, x))
    if source.is_float and target.is_float:
        return w.value(f"{'fpext' if target.bits > source.bits else 'fptrunc'} {a} {x} to {b}")
    if source.is_float:
        return _float_to_integer(w, source, target, lanes, x)
    if target.is_float:
        how = "uitofp" if source.kind in ("uint", "bool") else "sitofp"
        return w.value(f"{how} {a} {x} to {b}")
    bits = 1 if source.kind == "bool" else source.bits
    if target.bits == bits:
        return x
    if target.bits < bits:
        return w.value(f"trunc {a} {x} to {b}")
    return w.value(f"{'sext' if source.kind == 'int' else 'zext'} {a} {x} to {b}")


def _float_to_integer(w: Writer, source: DType, target: DType, lanes: int, x: str) -> str:
    """Truncate through a wide signed integer, so that out-of-range values wrap as in C."""
    a = type_of(source, lanes)
    wide = dtypes.int64 if target.bits >= 32 and target is not dtypes.int32 else dtypes.int32
    type_ = type_of(wide, lanes)
    kinds = f"{mangle(scalar_type(wide), lanes)}.{mangle(scalar_type(source), lanes)}"
    name = f"llvm.fptosi.sat.{kinds}"
    whole = w.intrinsic(name, type_, (a, x))
    return convert(w, wide, target, lanes, whole)


def _from_float8(w: Writer, source: DType, lanes: int, x: str) -> str:
    """Widen fp8: shift into a float16 (e5m2), or rebuild the exponent (e4m3)."""
    byte, half = vector("i8", lanes), vector("i16", lanes)
    wide = w.value(f"zext {byte} {x} to {half}")
    if source is dtypes.float8_e5m2:
        shifted = w.value(f"shl {half} {wide}, {_splat(8, lanes, 16)}")
        as_half = w.value(f"bitcast {half} {shifted} to {vector('half', lanes)}")
        return w.value(f"fpext {vector('half', lanes)} {as_half} to {vector('float', lanes)}")
    # e4m3: sign | 4 exponent | 3 mantissa; as half with bias 15, value * 2**8
    sign = w.value(f"and {half} {wide}, {_splat(128, lanes, 16)}")
    rest = w.value(f"and {half} {wide}, {_splat(127, lanes, 16)}")
    sign_half = w.value(f"shl {half} {sign}, {_splat(8, lanes, 16)}")
    body = w.value(f"shl {half} {rest}, {_splat(7, lanes, 16)}")
    bits = w.value(f"or {half} {sign_half}, {body}")
    as_half = w.value(f"bitcast {half} {bits} to {vector('half', lanes)}")
    wide_float = w.value(f"fpext {vector('half', lanes)} {as_half} to {vector('float', lanes)}")
    f = vector("float", lanes)
    scaled = w.value(f"fmul {f} {wide_float}, {splat_constant(256.0, dtypes.float32, lanes)}")
    is_nan = w.value(f"icmp eq {half} {rest}, {_splat(127, lanes, 16)}")
    nan = splat_constant(float("nan"), dtypes.float32, lanes)
    return w.value(f"select {vector('i1', lanes)} {is_nan}, {f} {nan}, {f} {scaled}")


NARROW = {  # mantissa bits, exponent bias, the first value past the largest, a nan
    "float8_e5m2": (2, 15, 0x7C, 0x7F),
    "float8_e4m3": (3, 7, 0x7F, 0x7F),
    "float16": (10, 15, 0x7C00, 0x7E00),
    "bfloat16": (7, 127, 0x7F80, 0x7FC0),
}


def _from_narrow(w: Writer, source: DType, lanes: int, x: str) -> str:
    """Widen a 16-bit float to float32."""
    short, f = vector("i16", lanes), vector("float", lanes)
    if source is dtypes.bfloat16:
        i = vector("i32", lanes)
        bits = w.value(f"zext {short} {x} to {i}")
        bits = w.value(f"shl {i} {bits}, {_splat(16, lanes)}")
        return w.value(f"bitcast {i} {bits} to {f}")
    if not w.native & HALF:
        return _from_half(w, lanes, x)
    half = w.value(f"bitcast {short} {x} to {vector('half', lanes)}")
    return w.value(f"fpext {vector('half', lanes)} {half} to {f}")


def _to_16(w: Writer, target: DType, lanes: int, x: str) -> str:
    """Round float32 to a 16-bit float, by an instruction where the Target has one."""
    native = "avx512bf16" in w.native if target is dtypes.bfloat16 else bool(w.native & HALF)
    if not native:
        return _to_narrow(w, target, lanes, x)
    if target is dtypes.bfloat16 and lanes > 16 and lanes % 2 == 0:
        return _to_16_by_halves(w, lanes, x)
    kind = vector("bfloat" if target is dtypes.bfloat16 else "half", lanes)
    narrow = w.value(f"fptrunc {vector('float', lanes)} {x} to {kind}")
    return w.value(f"bitcast {kind} {narrow} to {vector('i16', lanes)}")


def _to_16_by_halves(w: Writer, lanes: int, x: str) -> str:
    """Round to bfloat16 at most a register at a time: LLVM fails an assertion on 32 lanes of
    which a masked store, with a mask it knows, takes no more than 16."""
    half, f = lanes // 2, vector("float", lanes)
    parts = []
    for start in (0, half):
        places = ", ".join(f"i32 {start + i}" for i in range(half))
        part = w.value(f"shufflevector {f} {x}, {f} poison, <{half} x i32> <{places}>")
        parts.append(_to_16(w, dtypes.bfloat16, half, part))
    places, short = ", ".join(f"i32 {i}" for i in range(lanes)), vector("i16", half)
    return w.value(
        f"shufflevector {short} {parts[0]}, {short} {parts[1]}, <{lanes} x i32> <{places}>"
    )


def _from_half(w: Writer, lanes: int, x: str) -> str:
    """Widen float16 with integer operations: the exponent is moved by a product."""
    i, f, m = vector("i32", lanes), vector("float", lanes), vector("i1", lanes)

    bits = w.value(f"zext {vector('i16', lanes)} {x} to {i}")
    sign = w.value(f"and {i} {bits}, {_splat(0x8000, lanes)}")
    sign = w.value(f"shl {i} {sign}, {_splat(16, lanes)}")
    body = w.value(f"and {i} {bits}, {_splat(0x7FFF, lanes)}")
    shifted = w.value(f"shl {i} {body}, {_splat(13, lanes)}")
    as_float = w.value(f"bitcast {i} {shifted} to {f}")
    scaled = w.value(f"fmul {f} {as_float}, {splat_constant(2.0**112, dtypes.float32, lanes)}")
    number = w.value(f"bitcast {f} {scaled} to {i}")
    special = w.value(f"icmp uge {i} {body}, {_splat(0x7C00, lanes)}")
    beyond = w.value(f"or {i} {shifted}, {_splat(0x7F800000, lanes)}")
    chosen = w.value(f"select {m} {special}, {i} {beyond}, {i} {number}")
    full = w.value(f"or {i} {chosen}, {sign}")
    return w.value(f"bitcast {i} {full} to {f}")


def _to_narrow(w: Writer, target: DType, lanes: int, x: str) -> str:
    """Round float32 to a narrower float, half to even, with the rule of ml_dtypes (past the
    largest: infinity, or nan where there is none)."""
    mantissa, bias, top, nan = NARROW[target.name]
    highest = (1 << (target.bits - 1)) - 1
    i, m = vector("i32", lanes), vector("i1", lanes)

    bits = w.value(f"bitcast {vector('float', lanes)} {x} to {i}")
    sign = w.value(f"lshr {i} {bits}, {_splat(32 - target.bits, lanes)}")
    sign = w.value(f"and {i} {sign}, {_splat(highest + 1, lanes)}")
    magnitude = w.value(f"and {i} {bits}, {_splat(0x7FFFFFFF, lanes)}")
    # normal: add half an ulp (to even), shift, rebias
    drop = 23 - mantissa
    last = w.value(f"lshr {i} {magnitude}, {_splat(drop, lanes)}")
    last = w.value(f"and {i} {last}, {_splat(1, lanes)}")
    rounded = w.value(f"add {i} {magnitude}, {_splat((1 << (drop - 1)) - 1, lanes)}")
    rounded = w.value(f"add {i} {rounded}, {last}")
    normal = w.value(f"lshr {i} {rounded}, {_splat(drop, lanes)}")
    normal = w.value(f"sub {i} {normal}, {_splat((127 - bias) << mantissa, lanes)}")
    # subnormal: let the float adder round by adding a power of two of the right size
    magic = 127 + (1 - bias) + 23 - mantissa
    f = vector("float", lanes)
    as_float = w.value(f"bitcast {i} {magnitude} to {f}")
    magic_float = w.value(f"bitcast {i} {_splat(magic << 23, lanes)} to {f}")
    shifted = w.value(f"fadd {f} {as_float}, {magic_float}")
    small = w.value(f"bitcast {f} {shifted} to {i}")
    small = w.value(f"sub {i} {small}, {_splat(magic << 23, lanes)}")
    is_small = w.value(f"icmp ult {i} {magnitude}, {_splat((127 - bias + 1) << 23, lanes)}")
    value = w.value(f"select {m} {is_small}, {i} {small}, {i} {normal}")
    over = w.value(f"icmp uge {i} {value}, {_splat(top, lanes)}")
    big = w.value(f"select {m} {over}, {i} {_splat(top, lanes)}, {i} {value}")
    is_nan = w.value(f"icmp ugt {i} {magnitude}, {_splat(0x7F800000, lanes)}")
    big = w.value(f"select {m} {is_nan}, {i} {_splat(nan, lanes)}, {i} {big}")
    full = w.value(f"or {i} {big}, {sign}")
    short = vector(f"i{target.bits}", lanes)
    return w.value(f"trunc {i} {full} to {short}")


def row_for(name: str, near: bool = False) -> Row:
    """The row of an elementwise op; where it has another way for far arguments, also without."""
    if name not in ROWS:
        raise InternalError("llvm.rules", f"no row for {name}")
    return NEAR[name] if near else ROWS[name]
