"""The page of `tilegrad chip serve`: answers, files and their policy, in Chromium."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tilegrad.chip.estimate import areas, estimate
from tilegrad.chip.networks import resnet_50
from tilegrad.chip.page import Server, answer, serve
from tilegrad.chip.page.server import FOLDER, HEADERS, MOST_BYTES, POLICY, TYPES
from tilegrad.core.errors import UserError
from tilegrad.targets.npu.parameters import PRESETS, Parameters, preset

# ---- answers ------------------------------------------------------------------------------------


def test_an_estimate_is_the_librarys() -> None:
    status, found = answer("/api/estimate", {"parameters": {"preset": "edge"}})
    assert status == 200
    made = estimate(preset("edge"), resnet_50())
    assert found["cycles"] == made.cycles and found["energy"] == made.energy()
    assert found["areas"] == areas(preset("edge")) and len(found["products"]) == 24
    assert found["peak"] == 64 * 500e6 and found["bandwidth"] == 4e9
    assert found["watts"] == pytest.approx(1e-12 * sum(made.energy().values()) / made.seconds)


def test_every_network_has_an_estimate() -> None:
    _, start = answer("/api/start", {})
    assert set(start["presets"]) == set(PRESETS)
    small = [name for name in start["networks"] if "llama" not in name]
    assert len(small) == 5 and len(start["networks"]) == 9
    for name in small:
        status, found = answer("/api/estimate", {"network": name})
        assert status == 200 and found["cycles"] > 0, name


WRONG = [
    ({"lanes": 3}, "lanes", "a divisor of columns (16)", "lanes = 2 would fit"),
    ({"rows": 0}, "rows", "1 to 256", "rows = 1 would fit"),
    ({"banks": 3}, "banks", "a power of two", "banks = 2 or 4 would fit"),
    ({"clock": None}, "clock", "a number", "clock = 1000.0 would fit"),
    ({"speed": 3}, "speed", "a field of", None),
    (
        {"energy": {"mac": -1}},
        "energy.mac",
        "a number of pJ, at least 0",
        "energy.mac = 0.23 would fit",
    ),
    (
        {"energy": {"dram_byte": None}},
        "energy.dram_byte",
        "a number of pJ",
        "energy.dram_byte = 64.0 would fit",
    ),
]


@pytest.mark.parametrize(("table", "field", "expected", "hint"), WRONG)
def test_an_error_names_field_and_bound(
    table: dict[str, Any], field: str, expected: str, hint: str | None
) -> None:
    for question in ("/api/estimate", "/api/save"):
        status, found = answer(question, {"parameters": table})
        assert status == 400 and found["field"] == field, found
        assert expected in found["expected"] and found["hint"] == hint


def test_other_bad_questions() -> None:
    assert answer("/api/estimate", {"parameters": 3})[0] == 400
    assert answer("/api/estimate", {"network": "alexnet"})[1]["field"] == "network"
    assert answer("/api/film", {"rows": "four"})[1]["field"] == "rows"
    assert answer("/api/load", {"name": "a.toml", "text": "rows = "})[0] == 400
    assert answer("/api/nothing", {})[0] == 404


def test_saved_text_loads_again() -> None:
    pytest.importorskip("tomllib", reason="TOML is read from Python 3.11 on")
    for name in PRESETS:
        p = preset(name)
        _, saved = answer("/api/save", {"parameters": p.to_table()})
        _, loaded = answer("/api/load", {"name": "x.toml", "text": saved["text"]})
        assert Parameters.of(loaded["parameters"]) == p
    odd = {"name": 'a"b\\c\x7f\n\u00e9\U0001f600', "energy": {"mac": 1e-9}}
    _, saved = answer("/api/save", {"parameters": odd})
    _, loaded = answer("/api/load", {"name": "x.toml", "text": saved["text"]})
    assert loaded["parameters"]["name"] == odd["name"]
    assert loaded["parameters"]["energy"]["mac"] == 1e-9
    _, loaded = answer("/api/load", {"name": "mine.json", "text": '{"rows": 8}'})
    assert loaded["parameters"]["rows"] == 8 and loaded["parameters"]["name"] == "mine"


# ---- the server ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = serve(0)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def ask(server: Server, method: str, path: str, body: bytes = b"", **headers: str) -> Any:
    link = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    link.request(method, path, body, headers)
    reply = link.getresponse()
    return reply.status, reply.read(), reply.headers


def test_every_file_is_served_and_none_else(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert {path.name for path in FOLDER.iterdir() if path.suffix not in (".py", "")} == set(TYPES)
    for name, kind in TYPES.items():
        status, body, headers = ask(server, "GET", "/" if name == "index.html" else f"/{name}")
        assert status == 200 and body == (FOLDER / name).read_bytes()
        assert headers["Content-Type"] == f"{kind}; charset=utf-8"
        assert all(headers[key] == value for key, value in HEADERS.items())
    for path in ("/server.py", "/../server.py", "/page/page.js", "/%2e%2e/film.py", "/api/start"):
        assert ask(server, "GET", path)[0] == 404


def test_nothing_comes_from_elsewhere() -> None:
    assert "'unsafe" not in POLICY and "*" not in POLICY and "http" not in POLICY
    allowed = {"http://www.w3.org/2000/svg"}  # a name, not an address
    for name in TYPES:
        text = (FOLDER / name).read_text()
        found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w[\w./-]*", text)) - allowed
        assert not found, f"{name}: {found}"
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"\son\w+=|<style|style=|<script>|javascript:", page)


def test_other_hosts_and_sites_are_refused(server: Server) -> None:
    port = server.server_address[1]
    assert ask(server, "GET", "/", Host=f"evil.example:{port}")[0] == 403
    assert ask(server, "POST", "/api/start", Origin="http://evil.example")[0] == 403
    assert ask(server, "POST", "/api/start", Origin=f"http://127.0.0.1:{port}")[0] == 200
    assert ask(server, "POST", "/api/start", b"[]")[0] == 400
    assert ask(server, "POST", "/api/start", b"{")[0] == 400
    assert ask(server, "POST", "/api/start", b" " * (MOST_BYTES + 1))[0] == 413
    status, body, _ = ask(server, "POST", "/api/start")
    assert status == 200 and json.loads(body)["first"]["name"] == "16x16"


def test_a_taken_port_is_a_message(server: Server) -> None:
    with pytest.raises(UserError, match="cannot listen") as raised:
        serve(server.server_address[1])
    assert "--port 0" in str(raised.value)


# ---- in a browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("aiohttp", reason="driving the browser needs aiohttp")
    from chromium_page import Chromium, browser_path

    if browser_path() is None:
        pytest.skip("Chromium is missing: install Debian's package chromium")
    with Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture
def page(browser: Any, server: Server) -> Any:
    browser.size(1300, 900)
    browser.events.clear()
    browser.open(f"http://127.0.0.1:{server.server_address[1]}/")
    browser.until("document.body.dataset.ready === 'yes'")
    return browser


def total(page: Any, name: str) -> str:
    """A number of the first row."""
    return page.run(
        "[...document.querySelectorAll('.total')]"
        f".find(t => t.lastChild.textContent === '{name}').firstChild.textContent"
    )


def put(page: Any, control: str, value: object) -> None:
    page.run(
        f"{{const c = document.getElementById('{control}'); c.value = {json.dumps(value)};"
        "c.dispatchEvent(new Event('input')); c.dispatchEvent(new Event('change'));}"
    )


def test_sliders_move_everything(page: Any) -> None:
    before, area = total(page, "cycles"), total(page, "area")
    assert page.run("document.querySelectorAll('#roofline circle').length") == 24
    assert page.run("document.querySelectorAll('#cycles rect').length") == 24 + 3
    last = page.run("document.getElementById('s-rows').max")
    put(page, "s-rows", last)
    page.until(
        f"document.querySelector('#p-rows').value === '256' && '{before}' !== "
        "document.querySelectorAll('.total b')[2].textContent"
    )
    expected = estimate(Parameters(rows=256), resnet_50())
    digits = float(total(page, "cycles").split()[0])
    assert digits == pytest.approx(expected.cycles / 1e6, rel=0.005)
    assert total(page, "area") != area
    page.run("document.getElementById('list').open = true")
    assert page.run("document.querySelectorAll('#products td').length") == 24 * 7
    put(page, "network", "mobilenet-v1")
    page.until("document.querySelectorAll('#roofline circle').length !== 24")
    put(page, "preset", "edge")
    page.until("document.getElementById('p-rows').value === '8'")
    assert not page.troubles(), page.troubles()
    assert all(url.startswith(("http://127.0.0.1", "data:")) for url in page.addresses())


def test_a_bad_value_is_marked_and_mended(page: Any) -> None:
    put(page, "p-lanes", 3)
    page.until("document.querySelector('.control.bad') !== null")
    assert "lanes; expected a divisor of columns (16); lanes = 2 would fit" in page.run(
        "document.getElementById('error').textContent"
    )
    assert page.run("document.querySelector('.control.bad input').id") == "p-lanes"
    assert page.run("document.querySelector('.wrong').textContent").endswith("2 would fit")
    assert page.run("document.getElementById('results').className") == "stale"
    put(page, "p-lanes", 2)
    page.until("document.getElementById('error').hidden")
    assert page.run("document.querySelector('.control.bad') === null")
    put(page, "e-mac", "")
    page.until("document.querySelector('.control.bad input')?.id === 'e-mac'")
    assert page.run("document.getElementById('e-mac').closest('details').open")


def test_the_film_plays(page: Any) -> None:
    assert page.run("document.getElementById('clock-text').textContent").startswith("cycle 1 of 16")
    for _ in range(15):
        page.run("document.getElementById('forth').click()")
    shown = page.run(
        "[...document.querySelectorAll('.matrices div')].map(d => [...d.querySelectorAll('tr')]"
        ".map(r => [...r.cells].map(c => Number(c.textContent))))"
    )
    inputs, weights, out = shown
    product = [[sum(a * b for a, b in zip(row, col)) for col in zip(*weights)] for row in inputs]
    assert out == product
    page.run("document.getElementById('forth').click()")  # round to the first
    assert page.run("document.getElementById('clock').value") == "0"
    page.run("document.getElementById('play').click()")
    page.until("document.getElementById('clock').value !== '0'")
    page.run("document.getElementById('play').click()")
    put(page, "film-flow", "os")
    page.until("document.getElementById('clock-text').textContent.includes('of 15')")
    put(page, "film-rows", 9)
    page.until("document.getElementById('clock-text').textContent.includes('1 to 8')")


def test_files_are_loaded_and_saved(page: Any, tmp_path: Path) -> None:
    pytest.importorskip("tomllib", reason="TOML is read from Python 3.11 on")
    mine = tmp_path / "mine.toml"
    mine.write_text('preset = "edge"\nrows = 24\ncolumns = 12\n')
    choose(page, mine)
    page.until("document.getElementById('p-rows').value === '24'")
    assert page.run("document.getElementById('p-columns').value") == "12"
    page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "d"))
    page.run("document.getElementById('save').click()")
    saved = tmp_path / "d" / "mine.toml"
    for _ in range(200):
        if saved.exists() and saved.read_text().strip().endswith("idle_cycle = 0"):
            break
        threading.Event().wait(0.05)
    assert Parameters.load(saved) == Parameters.load(mine)
    mine.write_text("rows = 1000\n")
    choose(page, mine)
    page.until("!document.getElementById('error').hidden")
    said = page.run("document.getElementById('error').textContent")
    assert "rows" in said and "1 to 256" in said
    assert page.run("document.getElementById('p-rows').value") == "24"  # nothing is lost


def choose(page: Any, path: Path) -> None:
    root = page.send("DOM.getDocument")["root"]["nodeId"]
    node = page.send("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    page.send("DOM.setFileInputFiles", files=[str(path)], nodeId=node)


def test_it_fits_small_and_large_windows(page: Any, tmp_path: Path) -> None:
    for width, scheme in ((390, "light"), (820, "dark"), (1600, "dark")):
        page.size(width, 900, scheme)
        page.until("new Promise(r => setTimeout(() => r(true), 60))")
        wide = page.run("document.documentElement.scrollWidth")
        assert wide <= width, f"{wide} in {width}"
        over = page.run(
            "[...document.querySelectorAll('figure svg')].filter(s => "
            "[...s.querySelectorAll('text')].some(t => "
            "t.getBBox().x + t.getBBox().width > s.viewBox.baseVal.width + 1 || "
            "t.getBBox().x < -1)).map(s => s.id)"
        )
        assert over == [], f"words beyond the edge at {width}: {over}"
        page.picture(tmp_path / f"{width}.png")
        assert (tmp_path / f"{width}.png").stat().st_size > 20_000
