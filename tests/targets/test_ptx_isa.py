"""The table of PTX forms against ptxas: what `check` accepts assembles, what is illegal it refuses.

Every row of the table is tried with each of its words at least once and each sort of operand that
it accepts, in few runs of ptxas: one kernel per example, one module per requirement.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator

import isa
import pytest

from ptxsim import SimulationError
from ptxsim.decode import decode
from tilegrad.core.errors import InternalError
from tilegrad.targets.ptx.assemble import find_ptxas

HEAD = """.version {version}
.target {target}
.address_size 64
.extern .shared .align 128 .b8 shared_bytes[];
.const .align 16 .b8 constants[64];
"""
KERNEL = """.entry k{number}(.param .align 64 .b8 argument[128]) .maxntid 128 {{
.reg .pred %p<9>; .reg .b16 %h<20>; .reg .b32 %r<300>; .reg .b64 %d<20>;
{line}
$L: ret; }}
"""
ROUNDS = 3
Example = tuple[str, tuple[str, ...]]


def assembled(examples: list[Example], tmp_path) -> list[str]:
    """What ptxas has against the examples, each at the least version and target it needs."""
    ptxas = find_ptxas()
    if ptxas is None:
        pytest.skip("ptxas is neither on the PATH nor installed as a wheel: nothing was judged")
    groups: dict[tuple[str, str], list[Example]] = defaultdict(list)
    for form, operands in examples:
        special = [one for one in operands if one in isa.SPECIAL]
        groups[isa.requirements([form, *special])].append((form, operands))
    wrong = []
    for (version, target), group in groups.items():
        text, lines = HEAD.format(version=version, target=target), {}
        for number, (form, operands) in enumerate(group):
            line = f"{form} {', '.join(operands)};"
            lines[text.count("\n") + 3] = line
            text += KERNEL.format(number=number, line=line)
        path = tmp_path / f"module_{version}_{target}.ptx"
        path.write_text(text)
        done = subprocess.run(
            [ptxas, "-O0", "-arch", target, path, "-o", tmp_path / "cubin"],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "error" in line or "fatal" in line]
            for one in said:
                found = re.search(r"line (\d+)", one)
                where = lines.get(int(found[1]), "") if found else ""
                wrong.append(f"{version} {target}: {where} -> {one}")
    return wrong


# --- examples of every row ----------------------------------------------------------------------


def expanded(part: str) -> list[str]:
    """The words one part of a row chooses from, '' when it may be left out."""
    choices = part.rpartition("=")[2]
    words = re.sub(r"\$(\w+)", lambda found: isa.SETS[found[1]], choices.rstrip("?")).split("|")
    return ["", *words] if choices.endswith("?") else words


def forms() -> Iterator[str]:
    """Forms of every row of the table, each word of each row at least once."""
    for line in isa.TABLE.replace("\\\n", "").splitlines():
        if line.strip() and not line.startswith("=="):
            parts = [expanded(part) for part in f"{line} ".partition(" : ")[0].split()]
            longest = max(map(len, parts))
            for number in range(ROUNDS * longest):  # each round sets the parts off differently
                shift = 1 + number // longest
                words = (c[(number + place * shift) % len(c)] for place, c in enumerate(parts))
                yield ".".join(word for word in words if word)


def candidates(form: str, place: int) -> Iterator[str]:
    """Operands to offer to one place of a form: every sort, with values that make sense there."""
    number = "16" if "bulk" in form or re.match(r"cp\.async\.c[ag]", form) else "1"
    if form.startswith("bar") and place > form.startswith("bar.red"):
        number = "32"
    if form.startswith("setmaxnreg"):
        number = "40"
    if ".sp." in form and place == 4:  # of 8-bit elements all lanes give words
        number = "0"
    first = 4 * place if "m64n" not in form else 140 * place
    shape = re.search(r"m64n(\d+)", form)
    yield from (f"%{kind}{place + 1}" for kind in "phrd")
    yield from (f"!%p{place + 1}", number, "0f3F800000", "0d3FF0000000000000", "_")
    yield from ("%tid.x", "%cluster_ctarank")
    yield from ("%r250|%p1", "%r250|_", "_|%p1", "%p7|%p8")
    yield "$L" if form.startswith("bra") else "argument" if "param" in form else "shared_bytes"
    yield from (f"[%r{place + 1}+16]", f"[%d{place + 1}+-16]")
    if "const" in form or "param" in form:
        yield "[constants+16]" if "const" in form else "[argument]"
    for count in (1, 2, 3, 4, 5):
        yield f"[%d1, {{{', '.join(f'%r{n}' for n in range(count))}}}]"
    for count in {1, 2, 4} | ({int(shape[1]) // 2, int(shape[1]) // 4} if shape else set()):
        for kind in "hrd":
            if kind == "r" or count <= 4:
                limit = 18 if kind != "r" else 298
                yield "{" + ", ".join(f"%{kind}{(first + n) % limit}" for n in range(count)) + "}"
    yield f"{{%r1, {number}}}"


def examples_of(form: str) -> Iterator[Example]:
    """The form with operands that its signatures accept: each place goes through all it takes."""
    for signature in isa.form_of(form).signatures:
        offers = [
            [text for text in candidates(form, place) if test(isa.operand_of(text))]
            for place, test in enumerate(signature.tests)
        ]
        assert all(offers), (form, signature.text)
        for number in range(max(map(len, offers), default=1)):
            chosen = tuple(offer[number % len(offer)] for offer in offers)
            yield form, chosen[: signature.least] if number % 2 else chosen


def test_every_row_assembles(tmp_path) -> None:
    examples, refused = set(), 0
    for form in forms():
        if form.split(".")[0] in isa.HINTED and isa.REFUSED.fullmatch(form):
            refused += 1
            continue
        examples.update(examples_of(form))
    for form, operands in examples:
        isa.check(form, operands)
    assert len(examples) > 2000 and refused < 200
    wrong = assembled(sorted(examples), tmp_path)
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:60])


# --- examples by hand ---------------------------------------------------------------------------


def registers(kind: str, count: int, first: int = 0) -> str:
    """So many registers in braces."""
    return "{" + ", ".join(f"%{kind}{first + n}" for n in range(count)) + "}"


LEGAL: list[Example] = [
    (line.split(" ")[0], tuple(line.split(" ")[1:]))
    for line in """
mad.lo.s32 %r1 %r2 3 %r4
mul.wide.u32 %d1 %r1 24
fma.rn.f32 %r1 %r2 0f3F000000 %r3
max.NaN.f32 %r1 %r2 %r3
ex2.approx.ftz.f32 %r1 %r2
setp.neu.f32 %p1|%p2 %r1 %r2
selp.b16 %h1 %h2 0 %p1
cvt.rn.bf16.f32 %h1 %r1
cvt.rn.bf16x2.f32 %r1 %r2 %r3
cvt.rn.satfinite.e4m3x2.f32 %h1 %r2 %r3
cvt.rn.f16x2.e5m2x2 %r1 %h1
cvt.rzi.sat.s8.f32 %h1 %r1
cvt.u32.u8 %r1 %h1
cvt.rn.f32.s8 %r1 %h1
mov.b32 %r1 {%h1,%h2}
mov.b64 {%r1,%r2} %d1
mov.u32 %r1 %ctaid.y
mov.u32 %r1 shared_bytes
mov.pred %p1 1
and.pred %p1 %p2 !%p3
ld.param.u64 %d1 [argument+8]
ld.global.nc.L1::no_allocate.v4.b32 {%r1,%r2,%r3,%r4} [%d1+16]
ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%r1,%r2,%r3,%r4} [%d1+16]
ld.global.L1::evict_last.L2::cache_hint.b16 %h1 [%d1] %d2
ld.shared::cluster.v2.b64 {%d1,%d2} [%r1]
st.shared.b8 [%r1+-4] %h1
st.release.gpu.global.s32 [%d1] 1
red.relaxed.gpu.global.add.f32 [%d1] %r1
red.global.add.v4.f32 [%d1] {%r1,%r2,%r3,%r4}
prefetch.global.L2 [%d1]
prefetch.tensormap [%d1]
mapa.shared::cluster.u32 %r1 %r2 1
shfl.sync.bfly.b32 %r1|%p1 %r2 16 31 0xffffffff
bar.sync 1 128
bar.warp.sync -1
fence.acq_rel.cluster
fence.proxy.async.shared::cta
fence.proxy.async.global
fence.mbarrier_init.release.cluster
ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r1,%r2,%r3,%r4} [%r5]
stmatrix.sync.aligned.m8n8.x2.shared::cta.b16 [%r5] {%r1,%r2}
setmaxnreg.inc.sync.aligned.u32 240
wgmma.fence.sync.aligned
wgmma.wait_group.sync.aligned 0
cp.async.cg.shared.global.L2::128B [%r1] [%d1] 16 %r2
cp.async.bulk.wait_group.read 0
mbarrier.init.shared::cta.b64 [%r1] 1
mbarrier.arrive.expect_tx.shared::cta.b64 _ [%r1] 49152
mbarrier.arrive.release.cluster.shared::cluster.b64 _ [%r1]
mbarrier.arrive.shared::cluster.b64 _ [%r1]
st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r1] {%r2,%r3,%r4,%r5} [%r6]
mbarrier.try_wait.parity.shared::cta.b64 %p1 [%r1+8] %r2
mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p1 [%r1] %r2 1000
griddepcontrol.wait
bra.uni $L
""".strip().splitlines()
]
WGMMA = "wgmma.mma_async.sync.aligned."
LEGAL += [
    (
        WGMMA + "m64n256k16.f32.bf16.bf16",
        (registers("r", 128), "%d1", "%d2", "%p1", "1", "-1", "0", "1"),
    ),
    (
        WGMMA + "m64n64k16.f32.f16.f16",
        (registers("r", 32), registers("r", 4, 32), "%d2", "%p1", "1", "1", "1"),
    ),
    (WGMMA + "m64n96k8.f32.tf32.tf32", (registers("r", 48), "%d1", "%d2", "%p1", "1", "1")),
    (WGMMA + "m64n128k32.f16.e4m3.e5m2", (registers("r", 32), "%d1", "%d2", "%p1", "1", "1")),
    (WGMMA + "m64n32k32.s32.s8.s8", (registers("r", 16), "%d1", "%d2", "%p1")),
    (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        (registers("r", 4), registers("r", 4, 4), registers("r", 2, 8), registers("r", 4)),
    ),
    (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
        ("[%r1]", "[%d1, {%r2, %r3}]", "[%r4]"),
    ),
    (
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint",
        ("[%r1]", "[%d1, {%r2, %r3, 0}]", "[%r4+8]", "%h1", "%d2"),
    ),
    ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group", ("[%d1, {%r2, %r3}]", "[%r4]")),
]


def test_forms_that_kernels_use_assemble(tmp_path) -> None:
    for form, operands in LEGAL:
        isa.check(form, operands)
    wrong = assembled(LEGAL, tmp_path)
    assert not wrong, "\n".join(wrong)


ILLEGAL = [
    ("unknown instruction", "frobnicate.s32 %r1 %r2"),
    ("unknown instruction", "wgmma_async %r1"),
    ("no such modifiers", "mad.s32 %r1 %r2 %r3 %r4"),
    ("no such modifiers", "add.u8 %h1 %h2 %h3"),
    ("no such modifiers", "add.bf16.rn %h1 %h2 %h3"),
    ("no such modifiers", "fma.f32 %r1 %r2 %r3 %r4"),
    ("no such modifiers", "cvt.s32.f32 %r1 %r2"),
    ("no such modifiers", "cvt.rn.f64.f32 %d1 %r2"),
    ("no such modifiers", "cvt.sat.s32.u16 %r1 %h1"),
    ("no such modifiers", "setp.lo.s32 %p1 %r1 %r2"),
    ("no such modifiers", "and.f32 %r1 %r2 %r3"),
    ("no such modifiers", "ld.v4.global.b32 {%r1,%r2,%r3,%r4} [%d1]"),
    ("no such modifiers", "ld.global.v4.b64 {%d1,%d2,%d3,%d4} [%d5]"),
    ("no such modifiers", "ld.shared.L1::no_allocate.b32 %r1 [%r2]"),
    ("no such modifiers", "red.shared.add.L2::cache_hint.f32 [%r1] %r2 %d1"),
    ("no such modifiers", "atom.global.mul.f32 %r1 [%d1] %r2"),
    ("no such modifiers", "wgmma.mma_async.sync.aligned.m64n260k16.f32.bf16.bf16 %r1"),
    ("no such modifiers", "wgmma.mma_async.sync.aligned.m64n64k16.bf16.bf16.bf16 %r1"),
    ("no such modifiers", "wgmma.mma_async.sync.aligned.m64n40k32.s32.s8.s8 %r1"),
    ("no such modifiers", "mbarrier.try_wait.parity.cta.shared::cta.b64 %p1 [%r1] %r2"),
    ("no such modifiers", "cp.async.bulk.tensor.6d.shared::cluster.global %r1"),
    ("wrong number", "add.s32 %r1 %r2"),
    ("wrong number", "ret %r1"),
    ("wrong number", "mbarrier.init.shared::cta.b64 [%r1]"),
    ("wrong number", "ld.global.L2::cache_hint.b32 %r1 [%d1]"),
    ("wrong number", "ld.global.b32 %r1 [%d1] %d2"),
    ("wrong sort", "add.s32 %r1 %r2 %d3"),
    ("wrong sort", "add.s32 7 %r2 %r3"),
    ("wrong sort", "add.s32 %r1 %r2 0f3F800000"),
    ("wrong sort", "add.s32 %r1 %r2 %tid.x"),
    ("wrong sort", "add.f32 %r1 %r2 1"),
    ("wrong sort", "add.f32 %r1 %r2 0d3FF0000000000000"),
    ("wrong sort", "max.NaN.f16 %h1 %h2 1"),
    ("wrong sort", "mul.wide.s32 %r1 %r2 %r3"),
    ("wrong sort", "setp.eq.s32 %r1 %r2 %r3"),
    ("wrong sort", "selp.b32 %r1 %r2 %r3 %r4"),
    ("wrong sort", "and.b32 %r1 %r2 !%r3"),
    ("wrong sort", "ld.global.b32 %r1 [%r2]"),
    ("wrong sort", "ld.global.b32 %r1 %d2"),
    ("wrong sort", "ld.global.b64 %r1 [%d2]"),
    ("wrong sort", "ld.b32 %r1 [%r2]"),
    ("wrong sort", "ld.global.v4.b32 {%r1,%r2} [%d1]"),
    ("wrong sort", "ld.global.v2.b32 %r1 [%d1]"),
    ("wrong sort", "ld.global.b32 %r1 [%d1-4]"),
    ("wrong sort", "ld.shared.b32 %r1 [shared_bytes+%r2]"),
    ("wrong sort", "mov.u32 %r1 %clock64"),
    ("wrong sort", "mov.b32 %r1 {%h1,%h2,%h3,%h4}"),
    ("wrong sort", "cvt.rn.bf16.f32 %r1 %r2"),
    ("wrong sort", "shfl.sync.idx.b32 %r1|%r2 %r3 0 31 -1"),
    ("wrong sort", "bra %r1"),
    ("wrong sort", "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r5] {%r1,%r2}"),
    ("wrong sort", "mbarrier.try_wait.parity.shared::cta.b64 %p1 [%r1] %d2"),
    ("wrong sort", "prefetch.tensormap [%r1]"),
    ("wrong sort", "setmaxnreg.inc.sync.aligned.u32 %r1"),
    ("wrong sort", "wgmma.wait_group.sync.aligned %r1"),
]


@pytest.mark.parametrize(("reason", "line"), ILLEGAL, ids=[line for _, line in ILLEGAL])
def test_illegal_lines_are_refused(reason: str, line: str) -> None:
    form, *operands = line.split(" ")
    with pytest.raises(InternalError, match=reason) as caught:
        isa.check(form, operands)
    assert caught.value.where == "ptx.isa" and form in str(caught.value)


def test_illegal_matrix_operands_are_refused() -> None:
    form = WGMMA + "m64n256k16.f32.bf16.bf16"
    tail = ("%d2", "%p1", "1", "1", "0", "0")
    isa.check(form, (registers("r", 128), "%d1", *tail))
    for bad in [
        (registers("r", 64), "%d1", *tail),
        (registers("d", 128), "%d1", *tail),
        (registers("r", 128), "%r1", *tail),
        (registers("r", 128), registers("r", 4), *tail),  # a fragment has no transposition
        (registers("r", 128), "%d1", *tail[:4]),
        (registers("r", 128), "%d1", "%d2", "1", "1", "1", "0", "0"),
    ]:
        with pytest.raises(InternalError, match=r"ptx\.isa"):
            isa.check(form, bad)
    copy = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    for place in ("[%d1, {%r2}]", "[%d1]", "[%r1, {%r2, %r3}]", "[%d1, {%d2, %d3}]"):
        with pytest.raises(InternalError, match="wrong sort"):
            isa.check(copy, ("[%r1]", place, "[%r4]"))


def test_requirements_are_the_most_any_form_needs() -> None:
    assert isa.requirements([]) == ("7.0", "sm_80")
    assert isa.requirements(["add.s32", "ld.global.nc.v4.b32"]) == ("7.4", "sm_80")
    assert isa.requirements(["add.s32", "fence.proxy.async.global"]) == ("8.0", "sm_90")
    assert isa.requirements(["fence.acq_rel.cluster"])[1] == "sm_90"
    assert isa.requirements(["mov.u32", "%cluster_ctarank"]) == ("7.8", "sm_90")
    wide = WGMMA + "m64n64k16.f32.bf16.bf16"
    assert isa.requirements([wide, "mad.lo.s32"]) == ("8.0", "sm_90a")
    with pytest.raises(InternalError, match="unknown instruction"):
        isa.requirements(["nothing.b32"])


def test_every_form_of_the_table_is_simulated() -> None:
    """All that `isa` lets the emitter write can be decoded, but for what no module of ours has."""
    unknown, tried = [], 0
    for form in sorted(set(forms())):
        if form.split(".")[0] in isa.HINTED and isa.REFUSED.fullmatch(form):
            continue
        if re.match(r"ld\.(weak\.)?const", form):
            continue
        form, operands = next(iter(examples_of(form)))
        line, tried = f"{form} {', '.join(operands)};", tried + 1
        text = HEAD.format(version="8.6", target="sm_90a") + KERNEL.format(number=0, line=line)
        try:
            decode(text, 64)
        except SimulationError as error:
            unknown.append(f"{line}: {error}")
    assert tried > 800 and not unknown, unknown[:10]
