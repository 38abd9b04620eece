"""Coverage of the emitted SystemVerilog by random programs, read from Verilator's coverage.dat."""

from __future__ import annotations

from pathlib import Path

import pytest
import rtl_run
from npu_programs import small
from rtl_replay import replay, why_not

from tilegrad.chip.rtl.coverage import Point, read
from tilegrad.core.errors import UserError

DATA = """# SystemC::Coverage-3
C '\x01f\x02/a/npu_x.sv\x01l\x027\x01page\x02v_line/npu_x\x01o\x02block\x01h\x02top.a' 3
C '\x01f\x02/a/npu_x.sv\x01l\x027\x01page\x02v_line/npu_x\x01o\x02block\x01h\x02top.b' 0
C '\x01f\x02/a/npu_x.sv\x01l\x029\x01page\x02v_branch/npu_x\x01o\x02else\x01h\x02top.b' 0
"""


def test_copies_of_a_module_share_their_points(tmp_path: Path) -> None:
    file = tmp_path / "coverage.dat"
    file.write_text(DATA)
    found = read([file, file])
    assert found.share("line") == 1.0 and found.share("branch", "npu_x.sv") == 0.0
    assert sum(found.counts.values()) == 6
    assert [(p.line, p.what) for p in found.missed("branch")] == [(9, "else")]
    assert "npu_x.sv" in found.table()
    for kind, name in (("line", "npu_y.sv"), ("toggle", "")):
        with pytest.raises(UserError, match=f"no {kind} to cover"):
            found.share(kind, name)
    found.counts[Point("line", "npu_y.sv", 1, "block")] = 1
    assert found.table().splitlines()[2].split() == ["npu_y.sv", "100.0%", "-"]
    file.write_text("nothing")
    with pytest.raises(UserError, match="no coverage file"):
        read([file])


@pytest.mark.slow
def test_random_programs_reach_the_design(tmp_path: Path) -> None:
    """Verilator shows at every port what the simulator does; three programs reach every line of the
    mesh, the queues and the front end, and most branches of all."""
    why = why_not() or rtl_run.why_not()
    if why:
        pytest.skip(why)
    said, found = replay(small(sparse=True, weights="int4", stochastic=True), [0, 1, 2], tmp_path)
    assert "cycles are equal" in said, said
    print(found.table())
    for name in ("npu_mesh.sv", "npu_queue.sv", "npu_front.sv"):
        assert found.share("line", name) == 1.0, found.missed("line")
    assert found.share("branch") > 0.85, found.missed("branch")
