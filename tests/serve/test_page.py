"""The page at `/`: its files and their policy, its markdown in node, a conversation in Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium_page import Chromium, browser_path
from live_server import LiveServer, scripted_server

from tilegrad.serve.static import FOLDER, POLICY, TYPES

# ---- files --------------------------------------------------------------------------------------


def test_every_file_is_served_and_none_else(scripted: LiveServer) -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(TYPES)
    for name, kind in TYPES.items():
        path = "/" if name == "index.html" else f"/{name}"
        status, body, headers = scripted.ask("GET", path)
        assert status == 200 and body == (FOLDER / name).read_bytes()
        assert headers["Content-Type"] == f"{kind}; charset=utf-8"
        assert headers["Content-Security-Policy"] == POLICY
        assert headers["X-Content-Type-Options"] == "nosniff"
    for path in ("/static.py", "/page/app.js", "/../app.py", "/%2e%2e/app.py"):
        assert scripted.ask("GET", path)[0] == 404


def test_nothing_comes_from_elsewhere() -> None:
    assert "'unsafe" not in POLICY and "*" not in POLICY and "http" not in POLICY
    allowed = {"http://www.w3.org/2000/svg"}  # a name, not an address
    for path in FOLDER.iterdir():
        text = path.read_text()
        found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w[\w./-]*", text)) - allowed
        assert not found, f"{path.name}: {found}"


def test_no_html_is_made_of_words() -> None:
    scripts = "".join(path.read_text() for path in FOLDER.glob("*.js"))
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "DOMParser",
    ):
        assert word not in scripts
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"\son\w+=|<style|style=|<script>|javascript:", page)


# ---- markdown -----------------------------------------------------------------------------------


def trees(texts: list[str]) -> list[Any]:
    """What the page's parser makes of texts."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is missing: the parser runs in Chromium alone")
    script = (
        f"import('{(FOLDER / 'markdown.js').as_uri()}').then(m => {{"
        "let all=''; process.stdin.on('data', d => all += d).on('end', () =>"
        "console.log(JSON.stringify(JSON.parse(all).map(t => m.parse(t)))))})"
    )
    found = subprocess.run(
        [node, "--experimental-default-type=module", "-e", script],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return json.loads(found.stdout)


CASES: dict[str, Any] = {
    "a *b* **c** ~~d~~ `e<f>`": [
        ["p", {}, ["a ", ["em", {}, ["b"]], " ", ["strong", {}, ["c"]], " ", ["del", {}, ["d"]],
                   " ", ["code", {}, ["e<f>"]]]]
    ],
    "snake_case_name 2*3*4 * x *": [["p", {}, ["snake_case_name 2", ["em", {}, ["3"]], "4 * x *"]]],
    "***both***": [["p", {}, [["strong", {}, [["em", {}, ["both"]]]]]]],
    "## Head ##\ntext\nmore": [["h2", {}, ["Head"]], ["p", {}, ["text\nmore"]]],
    "<b onclick=x>hi</b>": [["p", {}, ["<b onclick=x>hi</b>"]]],
    "[x](javascript:alert(1)) [y](data:text/html,z) [z](/local)": [
        ["p", {}, [["span", {}, ["x"]], " ", ["span", {}, ["y"]], " ", ["span", {}, ["z"]]]]
    ],
    "[a](https://b.c/d_(e)) https://f.g/h.": [
        ["p", {}, [["a", {"href": "https://b.c/d_(e)"}, ["a"]], " ",
                   ["a", {"href": "https://f.g/h"}, ["https://f.g/h"]], "."]]
    ],
    "![pic](https://a.b/c.png)": [["p", {}, [["a", {"href": "https://a.b/c.png"}, ["pic"]]]]],
    "1. a\n2. b\n   - c\n   - d\n3. e": [
        ["ol", {}, [["li", {}, ["a"]],
                    ["li", {}, ["b", ["ul", {}, [["li", {}, ["c"]], ["li", {}, ["d"]]]]]],
                    ["li", {}, ["e"]]]]
    ],
    "4) x\n\n- [x] done": [
        ["ol", {"start": "4"}, [["li", {}, ["x"]]]], ["ul", {}, [["li", {}, ["☑ ", "done"]]]]
    ],
    "> q\nlazy\n\nout": [["blockquote", {}, [["p", {}, ["q\nlazy"]]]], ["p", {}, ["out"]]],
    "```py\nx < 1\n\n```\nafter": [
        ["pre", {"language": "py"}, [["code", {}, ["x < 1\n"]]]], ["p", {}, ["after"]]
    ],
    "```\nnot closed": [["pre", {"language": ""}, [["code", {}, ["not closed"]]]]],
    "a|b\n-|:-:\n`x|y`|\\|": [
        ["table", {}, [
            ["thead", {}, [["tr", {}, [["th", {}, ["a"]], ["th", {"align": "center"}, ["b"]]]]]],
            ["tbody", {}, [["tr", {}, [["td", {}, [["code", {}, ["x|y"]]]],
                                       ["td", {"align": "center"}, ["|"]]]]]]]]
    ],
    "---": [["hr", {}, []]],
    "a  \nb": [["p", {}, ["a", ["br", {}, []], "b"]]],
    "\\*no\\* `un": [["p", {}, ["*no* ", "`", "un"]]],
    "": [],
}  # fmt: skip


def test_markdown() -> None:
    for text, found in zip(CASES, trees(list(CASES)), strict=True):
        assert found == CASES[text], text


def test_markdown_of_hostile_text_ends_and_loses_nothing() -> None:
    texts = ["*" * 3000, "[" * 3000, "> " * 3000 + "x", "- " * 400 + "y", "`" * 999, "|" * 500]
    texts += ["**a" * 500, "_a" * 800, "(" * 2000, "[a](" * 500, "\x00\ud800" * 5, "<!--" * 300]

    def words(tree: Any) -> str:
        return tree if isinstance(tree, str) else "".join(words(child) for child in tree[2])

    for text, tree in zip(texts, trees(texts), strict=True):
        letters = re.sub(r"[^a-z]", "", "".join(words(node) for node in tree))
        assert letters == re.sub(r"[^a-z]", "", text), text[:20]


# ---- in a browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if browser_path() is None:
        pytest.skip("Chromium is missing: install Debian's package chromium")
    with Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture
def page(browser: Chromium, scripted: LiveServer) -> Chromium:
    """The page, as somebody sees it for the first time."""
    return fresh(browser, scripted)


def fresh(browser: Chromium, server: LiveServer) -> Chromium:
    browser.open(f"{server.url}/health")
    browser.run("localStorage.clear(); sessionStorage.clear()")
    browser.size(1000, 700)
    browser.open(server.url)
    browser.events.clear()
    browser.until("document.getElementById('model').textContent !== '…'")
    return browser


def say(page: Chromium, text: str, answers: int = 1) -> None:
    """Write a message and wait until so many answers are whole."""
    page.run("document.getElementById('words').focus()")
    page.type(text)
    page.key("Enter")
    whole(page, answers)


def whole(page: Chromium, answers: int) -> None:
    page.until(
        "document.getElementById('send').textContent === 'Send' && "
        f"document.querySelectorAll('.assistant').length === {answers}"
    )


def texts(page: Chromium) -> list[str]:
    """What the messages say."""
    return page.run("[...document.querySelectorAll('.message .body')].map(b => b.innerText)")


def press(page: Chromium, words: str, where: str = "document") -> None:
    """Press the last button of these words."""
    page.run(
        f"[...{where}.querySelectorAll('button')].filter(b => b.textContent === '{words}').at(-1)"
        ".click()"
    )


def done(page: Chromium) -> None:
    """Close the settings. The browser says `close` later than the press: wait for it."""
    page.run(
        "window.closed_settings = false; document.getElementById('settings')"
        ".addEventListener('close', () => { window.closed_settings = true }, { once: true })"
    )
    press(page, "Done")
    page.until("window.closed_settings")


def test_a_conversation(page: Chromium) -> None:
    say(page, "SAY **Hi** <img src=x onerror=alert(1)> `a`")
    assert texts(page)[1] == "Hi <img src=x onerror=alert(1)> a"
    assert page.run("document.querySelectorAll('#messages img, #messages script').length") == 0
    assert page.run("document.querySelector('.assistant strong').textContent") == "Hi"
    assert re.match(
        r".*\d+ tokens, first after", page.run("document.querySelector('.stats').innerText")
    )
    say(page, "SAY two", answers=2)
    sent = page.run("document.querySelectorAll('.message').length")
    assert sent == 4 and texts(page)[3] == "two"
    assert not page.troubles(), page.troubles()
    # It is there again after a reload, and the title is of the first message.
    page.reload()
    page.until("document.querySelectorAll('.message').length === 4")
    page.until("document.querySelector('.chat.current').innerText.includes('SAY Hi')")


def test_edit_and_retry(page: Chromium) -> None:
    say(page, "SAY one")
    say(page, "SAY two", answers=2)
    press(page, "Retry")
    page.until("document.querySelectorAll('.stats').length === 2")
    assert [t.strip() for t in texts(page)] == ["SAY one", "one", "SAY two", "two"]
    page.run(
        "[...document.querySelectorAll('.user button')].find(b => b.textContent === 'Edit').click()"
    )
    page.run("document.querySelector('.edit').value = ''; document.querySelector('.edit').focus()")
    page.type("SAY three")
    page.key("Enter")
    whole(page, 1)
    assert texts(page) == ["SAY three", "three"]


def test_stop(page: Chromium, scripted: LiveServer) -> None:
    page.run("document.getElementById('words').focus()")
    page.type("SLOW")
    page.key("Enter")
    page.until("(document.querySelector('.assistant .body')?.innerText.length || 0) > 3")
    assert page.run("document.getElementById('send').textContent") == "Stop"
    page.key("Escape")
    whole(page, 1)
    assert texts(page)[1].startswith("abcd")
    page.until("fetch('v1/live').then(r => r.json()).then(l => l.requests.length === 0)")


def test_settings_go_with_the_request(page: Chromium) -> None:
    page.run("document.getElementById('open-settings').click()")
    for name, value in {"system": "SAY told", "max_tokens": "3", "temperature": "0"}.items():
        page.run(f"document.getElementById('set-{name}').value = '{value}'")
    done(page)
    say(page, "hello")
    assert texts(page)[1] == "tol"
    kept = json.loads(page.run("localStorage.getItem('tilegrad.settings.1')"))
    assert kept == {"system": "SAY told", "max_tokens": 3, "temperature": 0}
    page.run("document.getElementById('open-settings').click()")
    page.run("document.getElementById('set-theme').value = 'dark'")
    done(page)
    page.until("getComputedStyle(document.body).backgroundColor === 'rgb(18, 20, 23)'")


def test_errors_are_shown(page: Chromium) -> None:
    say(page, "NAN")
    assert "not finite" in texts(page)[1]
    say(page, "x" * 600, answers=2)
    assert "context" in texts(page)[3]


def test_the_live_view(page: Chromium) -> None:
    page.run("document.getElementById('words').focus()")
    page.type("SLOW")
    page.key("Enter")
    page.run("document.getElementById('tab-live').click()")
    page.until("document.querySelector('#requests .running') !== null")
    page.until("document.querySelector('#gauge-running .value').textContent === '1'")
    page.until("document.getElementById('live-note').textContent.includes('tiny')")
    page.until("document.querySelector('#gauge-step .value').textContent.endsWith('ms')")
    page.key("Escape")
    page.until("document.getElementById('requests').innerText.includes('Nothing')")


def test_a_phone_and_the_keyboard(page: Chromium) -> None:
    say(page, "SAY | a | b |")
    page.size(360, 640)
    page.until("window.innerWidth === 360 && document.documentElement.scrollWidth <= 360")
    hidden = "getComputedStyle(document.getElementById('side')).visibility"
    page.until(f"{hidden} === 'hidden'")
    page.run("document.getElementById('menu').click()")
    page.until(f"{hidden} === 'visible'")
    page.key("n", modifiers=1)  # Alt+N
    page.until("document.querySelectorAll('.message').length === 0")
    page.until("document.activeElement.id === 'words'")
    page.until("document.querySelectorAll('.chat').length === 2")


def test_export_and_deletion(page: Chromium) -> None:
    page.run(
        "window.saved = []; HTMLAnchorElement.prototype.click = function () {"
        " fetch; window.saved.push(this.download); }"
    )
    say(page, "SAY x")
    page.run("document.getElementById('export').click()")
    page.until("window.saved.length === 2")
    assert page.run("window.saved") == ["SAY x.md", "SAY x.json"]
    page.run("document.querySelector('.chat .away').click()")
    page.until("document.querySelectorAll('.message').length === 0")
    assert page.run("localStorage.getItem('tilegrad.chats.1')") == "[]"


def test_a_server_that_wants_a_key(browser: Chromium, tiny_path: Path) -> None:
    with scripted_server(tiny_path, keys=("sesame",)) as server:
        status, _, headers = server.ask("GET", "/")
        assert status == 401 and headers["WWW-Authenticate"].startswith("Basic")
        # A browser asks the person then; here the answer is in the address.
        page = browser
        page.open(f"http://me:sesame@127.0.0.1:{server.port}/")
        page.run("localStorage.clear(); sessionStorage.clear()")
        page.open(server.url)
        page.until("document.getElementById('model').textContent === 'tiny'")
        say(page, "SAY with the browser's")
        assert texts(page)[1] == "with the browser's"
        page.run("document.getElementById('open-settings').click()")
        page.run("document.getElementById('set-key').value = 'wrong'")
        done(page)
        page.until("document.getElementById('notice').innerText.includes('asks for an API key')")
        press(page, "Enter key", "document.getElementById('notice')")
        page.run("document.getElementById('set-key').value = 'sesame'")
        done(page)
        page.until("document.getElementById('model').textContent === 'tiny'")
        say(page, "SAY with a key", answers=2)
        assert texts(page)[3] == "with a key"
        assert "sesame" not in page.run("JSON.stringify(localStorage)")


def test_it_asks_nobody_else(page: Chromium, scripted: LiveServer) -> None:
    say(page, "SAY ![p](https://example.org/p.png) [l](https://example.org/)")
    assert all(address.startswith((scripted.url, "blob:")) for address in page.addresses())
    link = "document.querySelector('.assistant a')"
    assert page.run(f"{link}.rel") == "noopener noreferrer nofollow"
