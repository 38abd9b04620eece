"""The server of the chip page: a few files and a few questions, on this machine alone.

Invariant: it listens at 127.0.0.1, answers only what names that host, reads no file but its own,
and the page asks nobody else; a bad parameter is an answer that names it, not a broken page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ...core.errors import UserError
from ...core.lock import new_lock
from ...core.parameter_file import parse_parameters, write_parameters
from ...targets.npu.parameters import (
    BOUNDS,
    DATAFLOWS,
    POWERS,
    PRESETS,
    WEIGHTS,
    Parameters,
    preset,
)
from ..estimate import areas, bandwidth, dense_peak, doubles, estimate
from ..film import film
from ..networks import DECODERS, NETWORKS, network
from ..workload import Workload

FOLDER = Path(__file__).parent
TYPES = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "ask.js": "text/javascript",
    "controls.js": "text/javascript",
    "pictures.js": "text/javascript",
    "film.js": "text/javascript",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MOST_BYTES = 1 << 16  # bytes of a question
PROMPT, KEYS = 512, 1024  # of a language model's prefill, and of its step of decoding
UNITS = {"resnet-50": "image", "mobilenet-v1": "image", "bert-base": "text"}
Table = dict[str, Any]


def _networks() -> dict[str, tuple[str, dict[str, int], int, str]]:
    """What can be chosen: (network, sizes, how many units a run is, the name of one)."""
    found: dict[str, tuple[str, dict[str, int], int, str]] = {
        name: (name, {}, 1, UNITS[name]) for name in NETWORKS
    }
    for name in DECODERS:
        prefill = {"tokens": PROMPT}
        found[f"{name}, prefill of {PROMPT}"] = (name, prefill, PROMPT, "token")
        decode = {"tokens": 1, "context": KEYS}
        found[f"{name}, decoding at {KEYS}"] = (name, decode, 1, "token")
    return found


CHOICES = _networks()
_tracing = new_lock()  # requests come in threads, and a network is traced once


@lru_cache(maxsize=16)
def _traced(choice: str) -> Workload:
    name, sizes, _, _ = CHOICES[choice]
    return network(name, **sizes)


def _network(choice: str) -> Workload:
    if choice not in CHOICES:
        raise UserError("bad network", op="chip", expected=", ".join(CHOICES), got=repr(choice))
    with _tracing:
        return _traced(choice)


# ---- questions ----------------------------------------------------------------------------------


def _start(_: Table) -> Table:
    """What the page needs once."""
    return {
        "presets": {name: preset(name).to_table() for name in PRESETS},
        "bounds": BOUNDS,
        "powers": POWERS,
        "dataflows": DATAFLOWS,
        "weights": WEIGHTS,
        "networks": list(CHOICES),
    }


def _estimate(given: Table) -> Table:
    """A network on an NPU: totals, parts, products, blocks."""
    p = _parameters(given)
    choice = str(given.get("network", "resnet-50"))
    found = estimate(p, _network(choice))
    energy = found.energy()
    products = [{**asdict(one), "cycles": one.cycles, "bound": one.bound} for one in found.products]
    return {
        "cycles": found.cycles,
        "seconds": found.seconds,
        "doubled": doubles(p),
        "utilisation": found.utilisation,
        "units": CHOICES[choice][2],
        "unit": CHOICES[choice][3],
        "energy": energy,
        "areas": areas(p),
        "watts": 1e-12 * sum(energy.values()) / found.seconds,
        "peak": 1e6 * p.clock * dense_peak(p),
        "bandwidth": bandwidth(p),
        "rows": p.rows,
        "columns": p.columns,
        "banks": p.banks,
        "products": products,
    }


def _film(given: Table) -> Table:
    """The frames of a small product."""
    names = ("dataflow", "rows", "columns", "length", "seed")
    return asdict(film(**{name: given[name] for name in names if name in given}))


def _parameters(given: Table) -> Parameters:
    table = given.get("parameters", {})
    if not isinstance(table, dict):
        raise UserError("bad parameters", op="npu", expected="a table of fields", got=table)
    return Parameters.of(table)


def _save(given: Table) -> Table:
    """The parameters as the text of a file."""
    p = _parameters(given)
    return {"text": write_parameters(p.to_table())}


def _load(given: Table) -> Table:
    """The parameters of the text of a file."""
    name = str(given.get("name", "mine.toml"))
    table = parse_parameters(str(given.get("text", "")), name)
    return {"parameters": Parameters.of(table, Path(name).stem).to_table()}


QUESTIONS: dict[str, Callable[[Table], Table]] = {
    "/api/start": _start,
    "/api/estimate": _estimate,
    "/api/film": _film,
    "/api/save": _save,
    "/api/load": _load,
}


def answer(path: str, given: Table) -> tuple[int, Table]:
    """Status and answer of a question; an error names the field where one is to blame."""
    if path not in QUESTIONS:
        return 404, {"error": f"no such question: {path}"}
    try:
        return 200, QUESTIONS[path](given)
    except UserError as error:
        first = str(error).splitlines()[0]
        field = re.search(r": bad (?:field )?([\w.]+)", first)
        return 400, {
            "error": first,
            "field": field[1] if field else None,
            "expected": None if error.expected is None else str(error.expected),
            "got": None if error.got is None else str(error.got),
            "hint": error.hint,
        }


# ---- the server ---------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_GET(self) -> None:
        """A file of the page."""
        name = "index.html" if self.path == "/" else self.path[1:]
        if not self._own_host():
            return
        if name not in TYPES:
            self._send(404, b"not found", "text/plain")
            return
        self._send(200, (FOLDER / name).read_bytes(), TYPES[name])

    def do_POST(self) -> None:
        """A question, as JSON."""
        if not self._own_host():
            return
        size = self.headers.get("Content-Length", "0")
        if not size.isdigit() or int(size) > MOST_BYTES:
            self._send(413, b'{"error": "too long"}', "application/json")
            return
        try:
            given = json.loads(self.rfile.read(int(size)) or b"{}")
        except ValueError:
            given = None
        if not isinstance(given, dict):
            self._send(400, b'{"error": "not a JSON object"}', "application/json")
            return
        status, found = answer(self.path, given)
        if self.path == "/api/start":
            found["first"] = self.server.first.to_table()
        self._send(status, json.dumps(found).encode(), "application/json")

    def _own_host(self) -> bool:
        """Refuse pages of other sites, and names that only resolve to this machine."""
        port = self.connection.getsockname()[1]
        hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        origin = self.headers.get("Origin")
        good = self.headers.get("Host") in hosts
        good = good and (origin is None or origin in {f"http://{host}" for host in hosts})
        if not good:
            self._send(403, b"only this machine may ask", "text/plain")
        return good

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""


class Server(ThreadingHTTPServer):
    """It listens at 127.0.0.1 alone; the page begins with `first`."""

    daemon_threads = True

    def __init__(self, port: int, first: Parameters) -> None:
        self.first = first
        super().__init__(("127.0.0.1", port), Handler)


def serve(port: int = 8420, first: Parameters | None = None) -> Server:
    """A server that listens; `serve_forever` runs it. Port 0 takes a free one."""
    try:
        return Server(port, first or preset("16x16"))
    except OSError as error:
        raise UserError(
            f"cannot listen at 127.0.0.1:{port}: {error.strerror}",
            op="chip",
            hint="--port 0 takes a free one",
        ) from error


__all__ = ["Server", "answer", "serve"]
