"""Assembling PTX: reports, warnings, failures, the Store, and several at once."""

from __future__ import annotations

import pytest
from assembled import assemble_all

from tilegrad.core.config import override
from tilegrad.core.errors import InternalError, UserError
from tilegrad.runtime.store import default_store
from tilegrad.targets.ptx import assemble as module
from tilegrad.targets.ptx.assemble import (
    BLOCKS,
    Assembly,
    Report,
    assemble,
    find_ptxas,
    reports_of,
    warnings_of,
)

HEAD = ".version 8.0\n.target {target}\n.address_size 64\n"
COPY = """.visible .entry {name}(.param .u64 data) .maxntid 128 {{
.reg .b64 %d<2>; .reg .b32 %r<3>; .shared .align 16 .b8 buffer[1024];
ld.param.u64 %d1, [data];
ld.global.b32 %r1, [%d1];
mov.u32 %r2, buffer;
st.shared.b32 [%r2], %r1;
bar.sync 0; bar.sync 1, 64;
st.global.b32 [%d1+4], %r1;
ret; }}
"""
needs_ptxas = pytest.mark.skipif(
    find_ptxas() is None, reason="ptxas is neither on the PATH nor installed as a wheel"
)


@pytest.fixture
def cache(tmp_path):
    """An empty Store of the test's own."""
    with override(cache_folder=str(tmp_path / "cache")):
        yield default_store()


def copy_text(name: str = "copy", target: str = "sm_90a") -> str:
    """A module of one small entry."""
    return HEAD.format(target=target) + COPY.format(name=name)


def spilling_text() -> str:
    """An entry that holds 64 values in 24 registers."""
    loads = "\n".join(f"ld.volatile.global.b32 %r{i}, [%d1+{4 * i}];" for i in range(64))
    stores = "\n".join(f"st.volatile.global.b32 [%d1+{4 * i}], %r{63 - i};" for i in range(64))
    return HEAD.format(target="sm_90a") + (
        ".visible .entry full(.param .u64 data) .maxntid 128 .maxnreg 24 {\n"
        f".reg .b64 %d<2>; .reg .b32 %r<64>;\nld.param.u64 %d1, [data];\n{loads}\n{stores}\nret; }}"
    )


def matrix_text(fenced: bool) -> str:
    """One wgmma whose accumulators are read back, with or without its fences."""
    held = ", ".join(f"%r{i}" for i in range(4))
    fence, wait = (
        (
            "wgmma.fence.sync.aligned;\n",
            "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n",
        )
        if fenced
        else ("", "")
    )
    zeros = "\n".join(f"mov.b32 %r{i}, 0;" for i in range(4))
    stores = "\n".join(f"st.global.b32 [%d1+{4 * i}], %r{i};" for i in range(4))
    return HEAD.format(target="sm_90a") + (
        ".visible .entry product(.param .u64 data) .maxntid 128 {\n.reg .pred %p<2>;"
        ".reg .b64 %d<4>; .reg .b32 %r<4>;\nld.param.u64 %d1, [data];\nmov.b64 %d2, 64;\n"
        f"mov.pred %p1, 1;\n{zeros}\n{fence}wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
        f"{{{held}}}, %d2, %d2, %p1, 1, 1, 0, 0;\n{wait}{stores}\nret; }}\n"
    )


@needs_ptxas
def test_report_and_machine_code(cache) -> None:
    made = assemble(copy_text())
    assert made.cubin[:4] == b"\x7fELF" and made.warnings == []
    report = made.reports["copy"]
    assert list(made.reports) == ["copy"] and 0 < report.registers <= 32
    assert report.shared_bytes == 1024 and report.barriers == 2
    assert report.stack_bytes == report.spill_stores == report.spill_loads == 0
    made.check_library("copy")
    assert assemble(copy_text(target="sm_80"), "sm_80").cubin[:4] == b"\x7fELF"


@needs_ptxas
def test_spills_are_reported_and_fail_a_library(cache) -> None:
    made = assemble(spilling_text())
    report = made.reports["full"]
    assert report.registers <= 24 and report.spill_stores >= 100 and report.stack_bytes >= 100
    with pytest.raises(InternalError, match=r"kernel wide: full has a stack frame of \d+"):
        made.check_library("wide")


@needs_ptxas
@pytest.mark.parametrize(
    ("bound", "tries", "helps"),
    [("", 1, True), ("", 2, True), ("", len(BLOCKS), False), (".maxnreg 128", 0, False)],
)
def test_spills_for_an_occupancy_that_nobody_asked_for(
    cache, monkeypatch, bound, tries, helps
) -> None:
    """A text without a bound that spills is assembled again with room for some blocks."""
    text = copy_text().replace(".maxntid 128", f"\n.maxntid 128, 1, 1\n{bound}\n")
    given = []

    def run(ptxas, text, arch):
        given.append(text)
        spilled = len(given) <= tries or not helps
        return Assembly(text.encode(), {"copy": Report(64, 8 * spilled, 4 * spilled)})

    monkeypatch.setattr(module, "_run", run)
    made = assemble(text)
    assert len(given) == 1 + tries and made.spills == (not helps)
    assert made.cubin.decode() == given[tries if helps else 0]
    for again, blocks in zip(given[1:], BLOCKS):
        assert f"\n.maxntid 128, 1, 1\n.minnctapersm {blocks}\n" in again
    assert assemble(text).cubin == made.cubin and len(given) == 1 + tries, "kept"


@needs_ptxas
def test_wgmma_warnings_fail_a_library(cache) -> None:
    good, bad = assemble(matrix_text(True)), assemble(matrix_text(False))
    good.check_library("product")
    assert not good.warnings and bad.warnings
    with pytest.raises(InternalError, match=r"kernel product: C75\d\d: "):
        bad.check_library("product")


@needs_ptxas
def test_failure_quotes_the_lines(cache) -> None:
    text = copy_text().replace("bar.sync 0", "bar.sink 0").replace("b32 %r2, buf", "b64 %r2, buf")
    with pytest.raises(InternalError, match=r"Unknown modifier '\.sink'") as caught:
        assemble(text)
    number = text.splitlines().index("bar.sink 0; bar.sync 1, 64;") + 1
    assert f"{number} | bar.sink 0; bar.sync 1, 64;" in str(caught.value)
    assert caught.value.where == "ptx.assemble"
    with pytest.raises(InternalError, match="ptxas gave"):
        assemble(copy_text(), "sm_1")
    assert cache.size() == 0


@needs_ptxas
def test_kept_in_the_store(cache, monkeypatch) -> None:
    text = spilling_text()
    made = assemble(text)
    assert cache.size() > len(made.cubin)

    def never(*arguments):
        raise AssertionError("ptxas ran although the Store has it")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_run", never)
        assert assemble(text) == made
        with pytest.raises(AssertionError, match="although"):
            assemble(text + "\n// another text\n")
        with pytest.raises(AssertionError, match="although"):
            assemble(text, "sm_100a")
        patch.setattr(module, "_version", lambda ptxas: "0.0")
        with pytest.raises(AssertionError, match="although"):
            assemble(text)


@needs_ptxas
def test_several_at_once(cache) -> None:
    texts = {name: copy_text(name) for name in ("first", "second", "third")}
    made = assemble_all(texts)
    assert list(made) == list(texts)
    assert all(list(one.reports) == [name] for name, one in made.items())
    assert assemble_all({}) == {}
    with pytest.raises(InternalError):
        assemble_all({**texts, "broken": "nothing"})


def test_without_ptxas_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(module, "find_ptxas", lambda: None)
    with pytest.raises(UserError, match="nvidia-cuda-nvcc"):
        assemble(copy_text())


def test_finds_a_wheel(monkeypatch, tmp_path) -> None:
    place = tmp_path / "nvidia" / "cu13" / "bin" / "ptxas"
    place.parent.mkdir(parents=True)
    place.write_text("#!/bin/sh\n")
    place.chmod(0o755)
    monkeypatch.setattr(
        module.shutil,
        "which",
        lambda name, which=module.shutil.which: None if name == "ptxas" else which(name),
    )
    monkeypatch.setattr(
        module.importlib.util,
        "find_spec",
        lambda name: type("Spec", (), {"submodule_search_locations": [str(tmp_path / "nvidia")]}),
    )
    module._wheel_ptxas.cache_clear()
    try:
        assert find_ptxas() == place
        place.unlink()
        module._wheel_ptxas.cache_clear()
        assert find_ptxas() is None
    finally:
        module._wheel_ptxas.cache_clear()


SAID = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'beta' for 'sm_90a'
ptxas info    : Function properties for beta
    112 bytes stack frame, 108 bytes spill stores, 144 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 112 bytes cumulative stack size, \
4096 bytes smem, 368 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Compile time = 7.846 ms
ptxas info    : Function properties for helper
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Compiling entry function 'alpha' for 'sm_90a'
ptxas info    : Function properties for alpha
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : (C7511) Potential Performance Loss: serialized in the function 'beta'
ptxas kernel.ptx, line 7; warning : Advisory: use sm_90a
ptxas warning : (C7508) setmaxnreg ignored
"""


def test_what_ptxas_says_is_read() -> None:
    assert reports_of(SAID) == {
        "beta": Report(24, 112, 108, 144, 4096, 376, 1),
        "alpha": Report(8),
    }
    assert warnings_of(SAID) == [
        "C7511: Potential Performance Loss: serialized in the function 'beta'",
        "Advisory: use sm_90a",
        "C7508: setmaxnreg ignored",
    ]
    assert module._unpacked(None) is None
