"""The PTX instruction forms we write, as data, and the check that every line of every test passes.

A row of TABLE reads `parts : signature / signature`. The parts are the dotted words of a form in
order, each a choice `a|b`, named `NAME=a|b` where the signature asks for it, left out at will
when it ends in `?`; `$name` stands for the words of SETS. A signature lists the operands:

    T, s32     a source of the type that part T chose, or of that type: register or immediate
    %T         a special register such as %tid.x
    =T         a register, written or only read; `=T|pred` a pair such as %r1|%p1;  _  itself
    +T         a register at least as wide as T;  2T  one twice as wide
    #          an integer;  name  a label;  [space]  an address;  [map]  [map, {coordinates}]
    {4*b32}    so many registers in braces; {V*T} as many as word V says, bare where V is left out
    A:token    an operand that is there if and only if part A is;  token?  one that may be left out

A line `== version target` says what the rows after it need. Invariant: whatever `check` accepts
ptxas assembles for `requirements` (the tests ask it); registers are told by %p, %h, %r and %d.
The file is long because the table is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tilegrad.core.errors import InternalError

SETS = {
    "int": "u16|s16|u32|s32|u64|s64",
    "int8": "u8|s8|u16|s16|u32|s32|u64|s64",
    "round": "rn|rz|rm|rp",
    "toint": "rni|rzi|rmi|rpi",
    "bits": "b16|b32|b64",
    "any": "b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64",
    "memory": "b8|u8|s8|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64",
    "order": "eq|ne|lt|le|gt|ge",
    "float_order": "eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan",
    "space": "global|shared::cta|shared::cluster|shared",
    "sem": "relaxed|acquire|release|acq_rel",
    "evict": "L1::evict_normal|L1::evict_unchanged|L1::evict_first|L1::evict_last|L1::no_allocate",
    "fetch": "L2::64B|L2::128B|L2::256B",
    "scope": "cta|cluster|gpu|sys",
    "cta": "shared::cta|shared",
    "bytes": "mbarrier::complete_tx::bytes",
    "dim": "1d|2d|3d|4d|5d",
    "wide16": "|".join(f"m64n{n}k16" for n in range(8, 257, 8)),
    "wide8": "|".join(f"m64n{n}k8" for n in range(8, 257, 8)),
    "wide32": "|".join(f"m64n{n}k32" for n in range(8, 257, 8)),
    "wide64": "|".join(f"m64n{n}k64" for n in range(8, 257, 8)),
    "wide_int": "|".join(f"m64n{n}k32" for n in (8, 24, *range(16, 257, 16))),
}

TABLE = """
== 7.0 sm_80 integers
add|sub T=$int : =T T T
mul|mul24 lo|hi T=u32|s32 : =T T T
mul lo|hi T=u16|s16|u64|s64 : =T T T
mul wide T=u16|s16|u32|s32 : =2T T T
mad lo|hi T=$int : =T T T T
mad wide T=u16|s16|u32|s32 : =2T T T 2T
div|rem|min|max T=$int : =T T T
abs|neg T=s16|s32|s64 : =T T
and|or|xor T=pred|b16|b32|b64 : =T T T
not T=pred|b16|b32|b64 : =T T
shl T=$bits : =T T u32
shr T=b16|u16|s16|b32|u32|s32|b64|u64|s64 : =T T u32
bfe T=u32|s32|u64|s64 : =T T u32 u32
bfi T=b32|b64 : =T T T u32 u32
prmt b32 f4e|b4e|rc8|ecl|ecr|rc16? : =b32 b32 b32 b32
dp4a u32|s32 u32|s32 : =b32 b32 b32 b32

== 7.0 sm_80 floats
add|sub|mul $round? ftz? sat? f32 : =f32 f32 f32
add|sub|mul $round? f64 : =f64 f64 f64
sub rn? f16x2 : =f16x2 f16x2 f16x2
fma|mad $round ftz? sat? f32 : =f32 f32 f32 f32
fma|mad $round f64 : =f64 f64 f64 f64
fma rn T=f16x2|bf16x2 : =T T T T
div approx|full ftz? f32 : =f32 f32 f32
div $round ftz? f32 : =f32 f32 f32
div $round f64 : =f64 f64 f64
min|max ftz? NaN? f32 : =f32 f32 f32
min|max f64 : =f64 f64 f64
min|max ftz? NaN? T=f16|f16x2 : =T T T
min|max NaN? T=bf16|bf16x2 : =T T T
abs|neg ftz? T=f32|f16|f16x2 : =T T
abs|neg T=f64|bf16|bf16x2 : =T T
rcp|sqrt approx ftz? f32 : =f32 f32
rcp|sqrt $round ftz? f32 : =f32 f32
rcp|sqrt $round f64 : =f64 f64
rsqrt|sin|cos|lg2|ex2 approx ftz? f32 : =f32 f32

== 7.0 sm_80 comparison and choice
selp T=$any : =T T T pred
selp b32 : =b32 f32 f32 pred
selp b64 : =b64 f64 f64 pred
setp $order T=s16|s32|s64 : =pred T T / =pred|pred T T
setp $order|lo|ls|hi|hs T=u16|u32|u64 : =pred T T / =pred|pred T T
setp eq|ne T=$bits : =pred T T / =pred|pred T T
setp $float_order ftz? f32 : =pred f32 f32 / =pred|pred f32 f32
setp $float_order f64 : =pred f64 f64 / =pred|pred f64 f64

== 7.0 sm_80 conversion and moves
cvt D=$int8 S=$int8 : =+D +S
cvt $round sat? D=f16|f32|f64 S=$int8 : =D +S
cvt $toint ftz? sat? D=$int8 S=f32 : =+D S
cvt $toint sat? D=$int8 S=f16|f64 : =+D S
cvt $round ftz? sat? f32 f64 : =f32 f64
cvt $round ftz? sat? f16 f32 : =f16 f32
cvt ftz? sat? f64 f32 : =f64 f32
cvt ftz? sat? f32 f16 : =f32 f16
cvt $toint? ftz? sat? f32 f32 : =f32 f32
cvt $toint? sat? T=f64.f64|f16.f16 : =T T
cvt rn|rz relu? bf16 f32 : =bf16 f32
cvt rn|rz relu? T=f16x2|bf16x2 f32 : =T f32 f32
mov T=pred|$any : =T T
mov T=b32|u32|s32 : =T %T
mov T=b32|u32|s32|b64|u64|s64 : =T name
mov b32 : =b32 f32 / =b32 {2*b16} / ={2*b16} b32
mov b64 : =b64 f64 / =b64 {2*b32} / ={2*b32} b64 / =b64 {4*b16} / ={4*b16} b64
cvta to? global|shared|local|const u64 : =u64 u64
== 7.7 sm_80
cvta to? param u64 : =u64 u64
cvta param u64 : =u64 name
== 7.1 sm_80
cvt f32 bf16 : =f32 bf16
== 7.8 sm_90
cvt rn satfinite relu? T=e4m3x2|e5m2x2 f32 : =T f32 f32
cvt rn relu? f16x2 S=e4m3x2|e5m2x2 : =f16x2 S
mapa A=shared::cluster? T=u32|u64 : =T T u32

== 7.0 sm_80 control
bra uni? : name
ret uni? :

== 7.4 sm_80 memory
ld weak? SPACE=$space? $evict? H=L2::cache_hint? $fetch? V=v2|v4? T=$memory : =V*+T [SPACE] H:b64
ld weak? SPACE=param|const V=v2|v4? T=$memory : =V*+T [SPACE]
ld global nc $evict? H=L2::cache_hint? $fetch? V=v2|v4? T=$memory : =V*+T [global] H:b64
st weak? SPACE=$space? $evict? H=L2::cache_hint? V=v2|v4? T=$memory : [SPACE] V*+T H:b64
st relaxed|release $scope SPACE=$space? $evict? H=L2::cache_hint? V=v2|v4? T=$memory : \
[SPACE] V*+T H:b64
prefetch SPACE=global|local L1|L2 : [SPACE]
== 8.1 sm_90
st async weak? shared::cluster $bytes V=v2|v4? T=b32|u32|s32|f32|b64|u64|s64|f64 : \
[shared] V*T [shared]
== 8.0 sm_90
prefetch tensormap : [global]

== 7.4 sm_80 atomics
atom $sem? $scope? SPACE=$space? add H=L2::cache_hint? \
T=u32|s32|u64|f32|f64 : =T [SPACE] T H:b64
atom $sem? $scope? SPACE=$space? add noftz H=L2::cache_hint? \
T=f16|f16x2 : =T [SPACE] T H:b64
red relaxed|release? $scope? SPACE=$space? add H=L2::cache_hint? T=u32|s32|u64|f32|f64 : \
[SPACE] T H:b64
== 8.1 sm_90
red relaxed|release? $scope? global add H=L2::cache_hint? V=v2|v4 f32 : [global] V*f32 H:b64

== 7.0 sm_80 order and barriers
fence sc|acq_rel $scope :
bar sync : u32 u32?
bar arrive : u32 u32
bar warp sync : u32
shfl sync bfly|up|down|idx b32 : =b32 b32 u32 u32 u32 / =b32|pred b32 u32 u32 u32
== 8.0 sm_90
fence proxy async global|shared::cta|shared::cluster :
fence mbarrier_init release cluster :
== 7.8 sm_90
barrier cluster arrive|wait aligned? :
griddepcontrol wait|launch_dependents :

== 7.8 sm_80 matrices
ldmatrix sync aligned m8n8 V=x1|x2|x4 trans? SPACE=$cta? b16 : ={V*b32} [SPACE]
mma sync aligned m16n8k16 row col f32.f16.f16.f32|f32.bf16.bf16.f32 : \
={4*b32} {4*=b32} {2*=b32} {4*=b32}
mma sync aligned m16n8k16 row col f16.f16.f16.f16 : ={2*b32} {4*=b32} {2*=b32} {2*=b32}
mma sync aligned m16n8k8 row col f32.f16.f16.f32|f32.bf16.bf16.f32 : \
={4*b32} {2*=b32} {1*=b32} {4*=b32}
mma sync aligned m16n8k8 row col f16.f16.f16.f16 : ={2*b32} {2*=b32} {1*=b32} {2*=b32}
mma sync aligned m16n8k8 row col f32.tf32.tf32.f32 : ={4*b32} {4*=b32} {2*=b32} {4*=b32}
mma sync aligned m16n8k4 row col f32.tf32.tf32.f32 : ={4*b32} {2*=b32} {1*=b32} {4*=b32}
mma sync aligned m16n8k16 row col satfinite? s32 s8|u8 s8|u8 s32 : \
={4*b32} {2*=b32} {1*=b32} {4*=b32}
mma sync aligned m16n8k32 row col satfinite? s32 s8|u8 s8|u8 s32 : \
={4*b32} {4*=b32} {2*=b32} {4*=b32}
mma sync aligned m8n8k4 row col f64.f64.f64.f64 : ={2*b64} {1*=b64} {1*=b64} {2*=b64}
== 7.8 sm_90
stmatrix sync aligned m8n8 V=x1|x2|x4 trans? SPACE=$cta? b16 : [SPACE] {V*=b32}
== 8.4 sm_90
mma sync aligned m16n8k32 row col f32 e4m3|e5m2 e4m3|e5m2 f32 : \
={4*b32} {4*=b32} {2*=b32} {4*=b32}
== 8.0 sm_90a
setmaxnreg inc|dec sync aligned u32 : #
wgmma fence|commit_group sync aligned :
wgmma wait_group sync aligned : #
wgmma mma_async sync aligned S=$wide16 D=f32.f16.f16|f32.bf16.bf16|f16.f16.f16 : \
={S*D} =b64 =b64 =pred # # # # / ={S*D} {4*=b32} =b64 =pred # # #
wgmma mma_async sync aligned S=$wide8 D=f32.tf32.tf32 : \
={S*D} =b64 =b64 =pred # # / ={S*D} {4*=b32} =b64 =pred # #
wgmma mma_async sync aligned S=$wide32 D=f32|f16 e4m3|e5m2 e4m3|e5m2 : \
={S*D} =b64 =b64 =pred # # / ={S*D} {4*=b32} =b64 =pred # #
wgmma mma_async sync aligned S=$wide_int D=s32.s8.s8|s32.u8.u8 satfinite? : \
={S*D} =b64 =b64 =pred / ={S*D} {4*=b32} =b64 =pred
== 8.2 sm_90a
wgmma mma_async sp sync aligned S=$wide32 D=f32.f16.f16|f32.bf16.bf16 : \
={S*D} =b64 =b64 =b32 # =pred # # # #
wgmma mma_async sp sync aligned S=$wide64 D=f32 e4m3|e5m2 e4m3|e5m2 : \
={S*D} =b64 =b64 =b32 # =pred # #
== 8.4 sm_90a
wgmma mma_async sync aligned S=$wide_int D=s32.s8.u8|s32.u8.s8 satfinite? : \
={S*D} =b64 =b64 =pred / ={S*D} {4*=b32} =b64 =pred

== 7.4 sm_80 copies that run on their own
cp async ca|cg $cta global H=L2::cache_hint? $fetch? : \
[shared] [global] # H:b64 / [shared] [global] # u32 H:b64
cp async commit_group|wait_all :
cp async wait_group : #
== 8.0 sm_90
cp async bulk commit_group :
cp async bulk wait_group read? : #
cp async bulk tensor N=$dim shared::cluster global tile? $bytes M=multicast::cluster? \
H=L2::cache_hint? : [shared] [map] [shared] M:u16 H:b64
cp async bulk tensor N=$dim global shared::cta tile? bulk_group H=L2::cache_hint? : \
[map] [shared] H:b64

== 7.0 sm_80 barriers in shared memory
mbarrier init SPACE=$cta? b64 : [SPACE] u32
== 7.1 sm_80
mbarrier arrive|arrive_drop SPACE=$cta? b64 : =b64 [SPACE] / _ [SPACE]
== 8.0 sm_90
mbarrier arrive|arrive_drop expect_tx release.cta|release.cluster? SPACE=$cta? b64 : \
=b64 [SPACE] u32 / _ [SPACE] u32
mbarrier arrive|arrive_drop release.cta|release.cluster? shared::cluster b64 : _ [shared] u32?
mbarrier try_wait parity acquire.cta|acquire.cluster? SPACE=$cta? b64 : =pred [SPACE] u32 u32?
"""

# Combinations of words that no instruction has, though each stands in a row.
REFUSED = re.compile(
    r".*\.v4\.[busf]64"  # 32 bytes in one access
    r"|.*\.shared.*\.L[12]::.*"  # hints are for global memory
)
HINTED = frozenset(("ld", "st", "atom", "red"))

# What a word or a special register needs beyond its row.
NEEDS = {
    "cluster": ("7.8", "sm_90"),
    "shared::cluster": ("7.8", "sm_90"),
    "shared::cta": ("7.8", "sm_80"),
}
TARGETS = ("sm_80", "sm_90", "sm_90a")

# Special registers; all hold 32 bits.
SPECIAL = frozenset(("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%cluster_ctarank"))

# The register kind that holds a type, and the kinds in order of width.
KIND = {
    "pred": "pred",
    **dict.fromkeys(
        ("b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16", "e4m3x2", "e5m2x2"), "b16"
    ),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "s16x2", "u16x2"), "b32"),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), "b64"),
}
WIDTHS = ("b16", "b32", "b64")
REGISTER = {"p": "pred", "h": "b16", "r": "b32", "d": "b64"}
NUMBERS = {
    "f32": ("float",),
    "f64": ("double",),
    **dict.fromkeys(("f16", "bf16", "f16x2", "bf16x2", "s16x2", "u16x2", "e4m3x2", "e5m2x2"), ()),
    "pred": ("integer", "not"),
}
SPACES = {
    "generic": ("b64",),
    "map": ("b64",),
    **dict.fromkeys(("global", "param", "const", "local"), ("b64", "name")),
}


# --- operands -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """What one operand's text is: its sort, the kind it holds, and the parts in its braces."""

    sort: str  # register, not, integer, float, double, special, address, vector, pair, name, _
    kind: str = ""
    parts: tuple[Operand, ...] = ()


_REGISTER = re.compile(r"(!(?=%p))?%([phrd])\d+\Z")
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?\Z")
_FLOAT = re.compile(r"0[fF][0-9a-fA-F]{8}\Z")
_DOUBLE = re.compile(r"0[dD][0-9a-fA-F]{16}\Z")
_NAME = re.compile(r"[A-Za-z_$][\w$]*\Z")
_ADDRESS = re.compile(
    r"\[\s*([%$\w]+)\s*(?:\+\s*-?(?:0x[0-9a-fA-F]+|\d+)\s*)?(?:,\s*(\{.*\})\s*)?\]\Z"
)


@lru_cache(maxsize=1 << 16)
def operand_of(text: str) -> Operand:
    """The sort of an operand, read from its text."""
    found = _REGISTER.match(text)
    if found:
        return Operand("not" if found[1] else "register", REGISTER[found[2]])
    for sort, pattern in (("integer", _INTEGER), ("float", _FLOAT), ("double", _DOUBLE)):
        if pattern.match(text):
            return Operand(sort)
    if text in SPECIAL:
        return Operand("special", "b32")
    if text == "_":
        return Operand("_")
    if text.startswith("{") and text.endswith("}"):
        return Operand("vector", "", tuple(operand_of(t.strip()) for t in text[1:-1].split(",")))
    if "|" in text:
        return Operand("pair", "", tuple(operand_of(t.strip()) for t in text.split("|")))
    found = _ADDRESS.match(text)
    if found:
        base = operand_of(found[1])
        return Operand(
            "address",
            base.kind if base.sort == "register" else base.sort,
            operand_of(found[2]).parts if found[2] else (),
        )
    return Operand("name" if _NAME.match(text) else "nothing known")


# --- signatures ---------------------------------------------------------------------------------

Test = Callable[[Operand], bool]


def _register(kinds: Iterable[str], dropped: bool = False) -> Test:
    allowed = frozenset(kinds)
    return lambda o: (o.sort == "register" and o.kind in allowed) or (dropped and o.sort == "_")


def _source(kinds: Iterable[str], name: str) -> Test:
    allowed, numbers = frozenset(kinds), NUMBERS.get(name, ("integer",))
    return lambda o: (o.sort == "register" and o.kind in allowed) or o.sort in numbers


def _vector(count: int, one: Test) -> Test:
    return lambda o: o.sort == "vector" and len(o.parts) == count and all(map(one, o.parts))


def _pair(left: Test, right: Test) -> Test:
    return lambda o: (
        o.sort == "pair" and len(o.parts) == 2 and left(o.parts[0]) and right(o.parts[1])
    )


def _address(space: str, coordinates: int) -> Test:
    bases = SPACES.get(space, ("b32", "b64", "name"))
    place = _source(("b32",), "s32")
    return lambda o: (
        o.sort == "address"
        and o.kind in bases
        and len(o.parts) == coordinates
        and all(map(place, o.parts))
    )


def _kinds(name: str, words: dict[str, str]) -> tuple[tuple[str, ...], str]:
    """(register kinds, type) of a type token: `T`, `+T`, `2T` or a type's own name."""
    word = name.lstrip("+2")
    kind = (words.get(word) or word).split(".")[0]
    first = KIND[kind]
    if name.startswith("+") and kind[0] in "bus" and not kind.startswith("bf"):
        return WIDTHS[WIDTHS.index(first) :], kind
    if name.startswith("2"):
        wide = kind[0] + str(2 * int(kind[1:]))
        return (KIND[wide],), wide
    return (first,), kind


def _count(word: str, kind: str) -> int:
    """Registers that a word asks for: `4`, `v4`, `x4`, or `m64n256k16` for accumulators."""
    shape = re.fullmatch(r"m64n(\d+)k\d+", word)
    if shape:
        return int(shape[1]) // (4 if kind == "f16" else 2)
    return int(word.lstrip("vx"))


def _test(token: str, words: dict[str, str]) -> Test:
    """The test of one token of a signature, the words of the form being known."""
    target, token = token.startswith("="), token.lstrip("=")
    if token.startswith("["):
        space = words.get(token[1:-1], token[1:-1]) or "generic"
        return _address(space, int(words["N"][0]) if space == "map" else 0)
    if token.startswith("%"):
        kind = _kinds(token[1:], words)[0][0]
        return lambda o: o.sort == "special" and o.kind == kind
    if token == "name":
        return lambda o: o.sort == "name"
    if token == "#":
        return lambda o: o.sort == "integer"
    if token == "_":
        return lambda o: o.sort == "_"
    if "|" in token:
        return _pair(*(_test(f"={one}", words) for one in token.split("|")))
    counted, _, name = token.strip("{}").rpartition("*")
    target, name = target or name.startswith("="), name.lstrip("=")
    kinds, kind = _kinds(name, words)
    if counted and token.startswith("{") and counted == "S":
        return _vector(_count(words[counted], kind), _register(("b32",)))
    if not counted or (counted in words and not words[counted]):
        return _register(kinds) if target else _source(kinds, kind)
    one = _register(kinds, not token.startswith("{")) if target else _source(kinds, kind)
    return _vector(_count(words.get(counted, counted), kind), one)


@dataclass(frozen=True)
class Signature:
    """The tests of the operands of one form, the last of which may be left out."""

    text: str
    tests: tuple[Test, ...]
    least: int


def _signature(text: str, words: dict[str, str]) -> Signature:
    tests, least, shown = [], 0, []
    for token in text.split():
        condition, _, rest = token.rpartition(":")
        if condition and not words.get(condition):
            continue
        tests.append(_test(rest.rstrip("?"), words))
        least += not rest.endswith("?")
        shown.append(rest)
    return Signature(" ".join(shown), tuple(tests), least)


# --- forms --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One row of the table: the forms it stands for, their signatures, and what they need."""

    pattern: re.Pattern[str]
    signatures: tuple[str, ...]
    version: str
    target: str


@dataclass(frozen=True)
class Form:
    """A form found in the table: every signature it may have, and what it needs."""

    signatures: tuple[Signature, ...]
    version: str
    target: str


def _pattern(parts: list[str]) -> re.Pattern[str]:
    text = ""
    for number, part in enumerate(parts):
        name, _, choices = part.rpartition("=")
        optional, choices = choices.endswith("?"), choices.rstrip("?")
        choices = re.sub(r"\$(\w+)", lambda found: SETS[found[1]], choices)
        words = "|".join(re.escape(word) for word in choices.split("|"))
        group = f"(?P<{name}>{words})" if name else f"(?:{words})"
        dot = r"\." if number else ""
        text += f"(?:{dot}{group})?" if optional else f"{dot}{group}"
    return re.compile(text)


def _rows() -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    version = target = ""
    for line in TABLE.replace("\\\n", "").splitlines():
        if line.startswith("=="):
            version, target = line.split()[1:3]
        elif line.strip():
            form, _, signatures = f"{line} ".partition(" : ")
            row = Row(_pattern(form.split()), tuple(signatures.split(" / ")), version, target)
            for word in form.split()[0].split("|"):
                rows.setdefault(word, []).append(row)
    return rows


ROWS = _rows()


def _newest(versions: Iterable[str]) -> str:
    return max(versions, key=lambda version: tuple(map(int, version.split("."))), default="7.0")


@lru_cache(maxsize=1 << 12)
def form_of(form: str) -> Form:
    """What the table says of a dotted form; InternalError when it has none such."""
    words = form.split(".")
    if words[0] not in ROWS:
        raise InternalError("ptx.isa", f"unknown instruction '{words[0]}' in '{form}'")
    found = [(row, match) for row in ROWS[words[0]] if (match := row.pattern.fullmatch(form))]
    if not found or (words[0] in HINTED and REFUSED.fullmatch(form)):
        raise InternalError("ptx.isa", f"'{words[0]}' has no such modifiers or types: '{form}'")
    signatures = tuple(
        _signature(text, match.groupdict()) for row, match in found for text in row.signatures
    )
    extra = [NEEDS[word] for word in words if word in NEEDS]
    least = min(found, key=lambda one: TARGETS.index(one[0].target))[0]
    version = _newest([least.version, *(version for version, _ in extra)])
    target = max([least.target, *(target for _, target in extra)], key=TARGETS.index)
    return Form(signatures, version, target)


def check(form: str, operands: Sequence[str]) -> None:
    """Raise InternalError unless the table has this form with such operands."""
    signatures = form_of(form).signatures
    known = [operand_of(text) for text in operands]
    for signature in signatures:
        if signature.least <= len(known) <= len(signature.tests):
            if all(test(one) for test, one in zip(signature.tests, known)):
                return
    expected = " or ".join(f"'{s.text}'" if s.tests else "none" for s in signatures)
    counts = {n for s in signatures for n in range(s.least, len(s.tests) + 1)}
    reason = "operands of the wrong sort" if len(known) in counts else "wrong number of operands"
    got = ", ".join(operands)
    raise InternalError("ptx.isa", f"{reason} for '{form}': expected {expected}, got '{got}'")


def requirements(forms: Iterable[str]) -> tuple[str, str]:
    """(least PTX version, least target) that all of these forms and special registers need."""
    version, target = "7.0", "sm_80"
    for form in forms:
        if form.startswith("%"):
            need = ("7.8", "sm_90") if form.startswith("%cluster") else ("7.0", "sm_80")
        else:
            known = form_of(form)
            need = (known.version, known.target)
        version = _newest((version, need[0]))
        target = max(target, need[1], key=TARGETS.index)
    return version, target
