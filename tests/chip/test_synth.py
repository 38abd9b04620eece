"""Synthesis: libraries, timer, buffers by hand; area and timing beside Yosys and OpenSTA."""

from __future__ import annotations

import html
import json
from pathlib import Path

import numpy as np
import pytest

from tilegrad.chip.synth import flow, tools
from tilegrad.chip.synth.flat import Flat
from tilegrad.chip.synth.flow import Synthesis, areas, synthesise
from tilegrad.chip.synth.liberty import Library, load, logic_of, read
from tilegrad.chip.synth.memories import Memory, library_text
from tilegrad.chip.synth.netlist import Instance, Module, Netlist, add_buffers
from tilegrad.chip.synth.pictures import wire_length
from tilegrad.chip.synth.power import estimate
from tilegrad.chip.synth.report import NOT_SIGNED_OFF, facts, page, record, table
from tilegrad.chip.synth.timing import Timer, Timing
from tilegrad.core.errors import UserError
from tilegrad.targets.npu.parameters import Parameters

TINY = """
library (tiny) {
  time_unit : "1ns"; capacitive_load_unit (1, pf); nom_voltage : 1.8; leakage_power_unit : "1nW";
  lu_table_template (by_load) { variable_1 : total_output_net_capacitance;
    variable_2 : input_net_transition; index_1 ("0, 1"); index_2 ("0, 1"); }
  lu_table_template (by_slew) { variable_1 : input_net_transition;
    variable_2 : total_output_net_capacitance; index_1 ("0, 1"); index_2 ("0, 1"); }
  cell (INV) { area : 2; cell_leakage_power : 1;
    pin (A) { direction : input; capacitance : 0.01; }
    pin (Y) { direction : output; function : "(!A)"; /* rises slower */
      timing () { related_pin : "A"; timing_sense : negative_unate;
        cell_rise (by_load) { values ("0.1, 0.3", "1.1, 1.3"); }
        cell_fall (by_slew) { values ("0.05, 0.55", "0.15, \\
          0.65"); }
        rise_transition (scalar) { values ("0.2"); }
        fall_transition (scalar) { values ("0.1"); } } } }
  cell (BUF) { area : 3;
    pin (A) { direction : input; capacitance : 0.01; }
    pin (Y) { direction : output; function : "A";
      timing () { related_pin : "A"; timing_sense : positive_unate;
        cell_rise (scalar) { values ("0.1"); } cell_fall (scalar) { values ("0.1"); }
        rise_transition (scalar) { values ("0.1"); } fall_transition (scalar) { values ("0.1"); }
  } } }
  cell (NAND) { area : 4;
    pin (A) { direction : input; capacitance : 0.01; }
    pin (B) { direction : input; capacitance : 0.01; }
    pin (Y) { direction : output; function : "(!(A B))";
      timing () { related_pin : "A B"; timing_sense : negative_unate;
        cell_rise (scalar) { values ("0.2"); } cell_fall (scalar) { values ("0.2"); }
        rise_transition (scalar) { values ("0.1"); } fall_transition (scalar) { values ("0.1"); }
  } } }
  cell (DFF) { area : 9; ff (IQ, IQN) { next_state : "D"; clocked_on : "CLK"; }
    pin (CLK) { direction : input; clock : true; capacitance : 0.02; }
    pin (D) { direction : input; capacitance : 0.01;
      timing () { related_pin : "CLK"; timing_type : setup_rising;
        rise_constraint (scalar) { values ("0.4"); }
        fall_constraint (scalar) { values ("0.3"); } } }
    pin (Q) { direction : output; function : "IQ";
      timing () { related_pin : "CLK"; timing_type : rising_edge;
        cell_rise (scalar) { values ("0.5"); } cell_fall (scalar) { values ("0.6"); }
        rise_transition (scalar) { values ("0.1"); } fall_transition (scalar) { values ("0.1"); }
  } } }
}
"""


@pytest.fixture(scope="module")
def tiny() -> Library:
    return read(TINY)


def timed(netlist: Netlist, library: Library) -> Timing:
    return Timer(Flat(netlist, library)).run()


def chain(*middle: Instance) -> Netlist:
    """A register, some cells from net 3 to net 9, a register."""
    first = Instance("first", "DFF", {"CLK": [1], "D": [2], "Q": [3]})
    last = Instance("last", "DFF", {"CLK": [1], "D": [9], "Q": [4]})
    ports = {"clk": ("input", [1]), "d": ("input", [2]), "q": ("output", [4])}
    return Netlist("top", {"top": Module("top", ports, [first, *middle, last])})


def inverter(name: str, a: int, y: int) -> Instance:
    return Instance(name, "INV", {"A": [a], "Y": [y]})


def test_a_table_has_one_order_whatever_the_file_says(tiny: Library) -> None:
    rise, fall = tiny.cells["INV"].arcs[0].delay
    assert rise.at(0.5, 0.5) == pytest.approx(0.1 + 0.5 + 0.1)
    assert fall.at(1.0, 0.0) == pytest.approx(0.55)  # by slew, then by load
    assert rise.at(2.0, -1.0) == pytest.approx(0.1 + 2.0 - 0.2)  # on beyond the ends
    assert tiny.cells["BUF"].buffer and not tiny.cells["INV"].buffer
    assert tiny.gate().name == "NAND" and tiny.cells["DFF"].sequential


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("(!((A B)+C))", "10101000"),
        ("A'*B", "0100"),
        ("A ^ B C", "00010100"),
        ("!(S A|!S B)", "11011000"),
    ],
)
def test_logic(text: str, rows: str) -> None:
    names = sorted({c for c in text if c.isalpha()})
    logic = logic_of(text)
    found = "".join(
        str(logic({n: i >> (len(names) - 1 - k) & 1 for k, n in enumerate(names)}))
        for i in range(1 << len(names))
    )
    assert found == rows


def test_a_file_that_is_no_library() -> None:
    for text in ("", "cell (A) { }", "library (x) { cell (A) {"):
        with pytest.raises(UserError, match="Liberty"):
            read(text)


def test_a_chain_by_hand(tiny: Library) -> None:
    found = timed(chain(inverter("one", 3, 5), inverter("two", 5, 9)), tiny)
    # Q falls at 0.6 (slew 0.1); one rises: 0.1 + 0.01 + 0.02; two falls at slew 0.2, load 0.01
    first, second = 0.6 + 0.13, 0.05 + 0.5 * 0.01 + 0.1 * 0.2
    # Q rises at 0.5; one falls: 0.05 + 0.005 + 0.01; two rises at slew 0.1: 0.1 + 0.01 + 0.02
    other = 0.5 + 0.065 + 0.13 + 0.4
    assert found.path.period == pytest.approx(max(first + second + 0.3, other))
    assert found.path.start == "first" and found.path.end == "last"
    assert [s.cell for s in found.path.steps] == ["first", "one", "two"]
    assert found.megahertz == pytest.approx(1e3 / found.path.period)


def test_constants_stop_paths(tiny: Library) -> None:
    """A NAND with a 0 is a 1; with a 1 it is an inverter."""
    for bit, steps in (("0", ["first"]), ("1", ["first", "gate"])):
        gate = Instance("gate", "NAND", {"A": [3], "B": [bit], "Y": [9]})
        netlist = chain(gate)
        netlist.modules["top"].ports["out"] = ("output", [3])
        assert [s.cell for s in timed(netlist, tiny).path.steps] == steps


def test_a_loop_is_an_error(tiny: Library) -> None:
    loop = Instance("gate", "NAND", {"A": [3], "B": [5], "Y": [9]})
    with pytest.raises(UserError, match="loop"):
        timed(chain(loop, inverter("back", 9, 5)), tiny)


def nested(sinks: int) -> Netlist:
    """One register that drives so many inverters in each of two copies of a module."""
    inner = [inverter(f"i{n}", 2, 10 + n) for n in range(sinks)]
    low = Module("low", {"x": ("input", [2]), "y": ("output", [10])}, inner)
    netlist = chain(
        Instance("left", "low", {"x": [3], "y": [5]}),
        Instance("right", "low", {"x": [3], "y": [6]}),
        Instance("join", "NAND", {"A": [5], "B": [6], "Y": [9]}),
    )
    netlist.modules["low"] = low
    return netlist


def test_buffers_bound_every_load_and_keep_the_logic(tiny: Library) -> None:
    netlist = nested(300)
    before = timed(netlist, tiny)
    assert before.loads.max() == pytest.approx(6.0)
    added = add_buffers(netlist, tiny)
    flat = Flat(netlist, tiny)
    after = Timer(flat).run()
    assert np.delete(after.loads, flat.inputs["clk"], 0).max() <= 0.16 + 1e-9
    assert added == sum(flat.names[k] == "BUF" for k in flat.kind)
    assert areas(netlist, tiny)["top"][1] == 2 * 9 + 4 + 600 * 2 + added * 3
    sources = {}  # every inverter still gets the register, through buffers alone
    cells = [(flat.names[flat.kind[n]], flat.at_pins(n), flat.name(n)) for n in range(flat.cells)]
    for kind, pins, _ in cells:
        if kind == "BUF":
            sources[pins["Y"]] = pins["A"]
    register = next(pins["Q"] for _, pins, name in cells if name == "first")
    for kind, pins, _ in cells:
        if kind == "INV":
            net = pins["A"]
            while net in sources:
                net = sources[net]
            assert net == register
    assert netlist.counts() == {"top": 1, "low": 2}


def test_a_port_that_goes_straight_through(tiny: Library) -> None:
    netlist = chain(
        Instance("wire", "low", {"x": [3], "y": [5], "k": [6]}),
        Instance("gate", "NAND", {"A": [5], "B": [6], "Y": [9]}),
    )
    ports = {"x": ("input", [2]), "y": ("output", [2]), "k": ("output", ["1"])}
    netlist.modules["low"] = Module("low", ports, [])
    assert timed(netlist, tiny).path.period == pytest.approx(0.6 + 0.2 + 0.4)


def test_memories_are_cells_with_assumptions(tiny: Library) -> None:
    pins = {"clk_0": [1], "read_0": [3], "q_0": [9]}
    netlist = chain(Instance("ram", "npu_sram_64x8", pins))
    memory = Memory(access=3.0, setup=0.25, load=0.05)
    cells = tiny.with_cells(read(library_text(netlist, memory)))
    assert netlist.memories() == {"npu_sram_64x8": 1}
    found = timed(netlist, cells)
    assert found.path.start == "ram" and found.path.period == pytest.approx(3.4)
    assert cells.cells["npu_sram_64x8"].area == pytest.approx(512 * memory.area, rel=1e-3)


def test_power_by_hand(tiny: Library) -> None:
    netlist = chain(inverter("one", 3, 9))
    flat = Flat(netlist, tiny)
    found = estimate(flat, Timer(flat).run(), 100.0, 0.5)
    pico = 1.8**2 / 2 * (2 * 0.04 + 0.5 * 0.03)  # the clock twice a cycle, d, Q and Y half
    assert found.switching == pytest.approx(pico * 0.1)
    assert found.leakage == pytest.approx(1e-6) and found.total > found.switching


# ---- with the tools -----------------------------------------------------------------------------

SMALL = Parameters.of({"preset": "edge", "rows": 2, "columns": 2, "lanes": 2})


def needs(*names: str) -> None:
    for name in names:
        if tools.find(name) is None:
            pytest.skip(f"{name} is not installed: {tools.TOOLS[name][1]}")
    if not tools.OSU018.is_file():
        pytest.skip("no cell library: apt-get install qflow-tech-osu018")


def agrees(found: Synthesis) -> None:
    """Area is Yosys', timing is OpenSTA's."""
    assert found.area == pytest.approx(found.yosys_area, rel=1e-6) and found.area > 0
    if found.opensta is not None:
        assert found.path.period == pytest.approx(found.opensta.period, rel=1e-5)
    total = sum(b.count * b.area for b in found.blocks)
    assert total == pytest.approx(found.area) and found.cells == sum(found.kinds.values())
    assert sum(b.count * b.cells for b in found.blocks) == found.cells
    assert max(b.period or 0.0 for b in found.blocks) <= found.path.period + 1e-9


def test_a_multiplier_is_what_yosys_and_opensta_say(tmp_path: Path) -> None:
    needs("yosys")
    seen = []
    found = synthesise(SMALL, tmp_path, "pe", report=lambda *given: seen.append(given))
    agrees(found)
    assert 15_000 < found.area < 40_000 and 3 < found.path.period < 12 and seen
    assert set(found.kinds) <= set(load(tools.OSU018).cells)
    text = json.dumps(record(found))
    made = html.unescape(page(found, tmp_path))
    assert not json.loads(text)["sign_off"] and NOT_SIGNED_OFF in made
    for _, words in facts(found):
        assert words in made
    assert len(table(found)) == 1 + len(found.blocks)
    if tools.find("dot"):
        assert "data:image/svg+xml" in made and (tmp_path / "schematic.svg").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("flow", ["ws", "os"])
def test_a_small_mesh(flow: str, tmp_path: Path) -> None:
    needs("yosys", "sta")
    p = Parameters.of({**SMALL.to_table(), "dataflow": flow})
    found = synthesise(p, tmp_path, "mesh")
    agrees(found)
    assert next(b for b in found.blocks if b.name == "npu_pe").count == 4


@pytest.mark.slow
def test_a_whole_chip_and_the_layout_of_a_mesh(tmp_path: Path) -> None:
    needs("yosys", "sta", "qflow", "klayout")
    found = synthesise(SMALL, tmp_path, "chip", layout=True)
    agrees(found)
    assert found.memories and found.memory_area > 0
    made = found.layout
    assert made is not None and made.cells > 1000 and made.wire > 1
    for name in made.files:
        assert (tmp_path / name).stat().st_size > 10_000


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="part"):
        synthesise(SMALL, tmp_path, "wafer")
    with pytest.raises(UserError, match="qflow-tech-osu018"):
        synthesise(SMALL, tmp_path, "pe", tmp_path / "none.lib")
    (tmp_path / "tiny.lib").write_text(TINY)
    monkeypatch.setattr(tools.shutil, "which", lambda name: None)
    monkeypatch.setattr(tools.importlib.util, "find_spec", lambda name: None)
    assert set(tools.missing()) == set(tools.TOOLS)
    with pytest.raises(UserError, match="apt-get install yosys"):
        synthesise(SMALL, tmp_path, "pe", tmp_path / "tiny.lib")


def test_a_tool_that_fails_loses_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("yosys")

    def broken(*given: object) -> None:
        raise UserError("dot ended with 1", op="chip synth")

    monkeypatch.setattr(flow, "schematic", broken)
    monkeypatch.setattr(flow.opensta, "check", broken)
    monkeypatch.setattr(tools, "find", lambda name: "yosys")
    found = synthesise(SMALL, tmp_path, "pe")
    assert set(found.failed) == {"OpenSTA", "schematic"} and found.area > 0
    assert "dot ended with 1" in page(found, tmp_path)


DEF = """UNITS DISTANCE MICRONS 100 ;
NETS 1 ;
- a ( X Y )
+ ROUTED metal1 ( 1000 500 ) M2_M1
  NEW metal2 ( 1000 500 ) ( 1300 * ) ( * 900 ) M2_M1 ;
END NETS
"""


def test_wires_of_a_layout() -> None:
    assert wire_length(DEF) == pytest.approx((300 + 400) / 100 / 1e3)


def test_a_tool_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ended with 3"):
        tools.run(["sh", "-c", "echo no such cell; exit 3"], tmp_path, tmp_path / "log")
    assert "no such cell" in (tmp_path / "log").read_text()
