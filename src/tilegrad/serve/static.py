"""The page at `/`: its files, read once, with headers that let it load nothing from elsewhere.

Invariant: what is served is a fixed list of files of the package; no part of a request names a
path. The policy forbids inline scripts and styles, other sites, frames and forms.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

FOLDER = Path(__file__).parent / "page"
TYPES = {
    "index.html": "text/html",
    "style.css": "text/css",
    "app.js": "text/javascript",
    "live.js": "text/javascript",
    "markdown.js": "text/javascript",
    "store.js": "text/javascript",
    "stream.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def add_page(app: web.Application) -> None:
    """Serve the page's files at their names, and its first one at `/`."""
    for name in TYPES:
        app.router.add_get("/" if name == "index.html" else f"/{name}", _handler(name))


def _handler(name: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    body = (FOLDER / name).read_bytes()

    async def file(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=TYPES[name], charset="utf-8", headers=HEADERS)

    return file


__all__ = ["add_page"]
