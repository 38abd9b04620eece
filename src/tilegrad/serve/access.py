"""Who may ask: keys, the host that is asked, and the site whose page asks.

A browser asks in the name of whoever sits before it. So a page of another site is refused, unless
it was allowed, and a server that only this machine can reach answers only to this machine's names:
a site that names this machine its own (DNS rebinding) is another host.
Invariant: keys are compared in constant time, all of them each time; with none that fits, only
/health answers.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from .refused import Refused
from .settings import Settings

FREE = ("/health", "/ping")


def _key(name: str) -> Any:
    """What a request's own facts are kept under; older versions of the library take strings."""
    return web.RequestKey(name, str) if hasattr(web, "RequestKey") else name


ID, SALT = _key("id"), _key("salt")


class Access:
    """The rules of one server."""

    def __init__(self, settings: Settings) -> None:
        self.digests = [digest(key) for key in settings.keys]
        self.local = is_loopback(settings.host)
        self.origins = frozenset(settings.origins)

    def check(self, request: web.Request) -> None:
        """Refuse who may not ask; note the salt of who may."""
        if self.local and not is_loopback(host_of(request.headers.get("Host", ""))):
            raise Refused("this server answers to this machine alone", status=403)
        origin = request.headers.get("Origin")
        if origin is not None and not self.allows(request, origin):
            raise Refused("pages of other sites may not use this server", status=403)
        if request.path in FREE or not self.digests:
            return
        if request.method == "OPTIONS":
            return
        found = None
        given = digest(key_of(request))
        for known in self.digests:
            if hmac.compare_digest(given, known):
                found = known
        if found is None:
            raise Refused(
                "a key is needed: Authorization: Bearer KEY", status=401, code="invalid_api_key"
            )
        if len(self.digests) > 1:  # what one key asked for is not to be found out by another
            request[SALT] = hashlib.sha256(b"salt" + found).hexdigest()[:32]

    def allows(self, request: web.Request, origin: str) -> bool:
        """Whether a site's pages may ask."""
        own = urlsplit(origin).netloc == request.headers.get("Host", "")
        return own or origin in self.origins or "*" in self.origins

    def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Tell the browser what it may hand to an allowed site."""
        origin = request.headers.get("Origin")
        if origin is not None and (origin in self.origins or "*" in self.origins):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Vary"] = "Origin"
        response.headers.setdefault("X-Content-Type-Options", "nosniff")

    def preflight(self) -> web.Response:
        """What a browser asks before it lets a page of an allowed site ask."""
        headers = {
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Api-Key, X-Request-Id",
            "Access-Control-Max-Age": "600",
        }
        return web.Response(status=204, headers=headers)


def digest(key: str) -> bytes:
    """A key of any length as bytes of one length."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def key_of(request: web.Request) -> str:
    """The key that a request brings: as a bearer, a browser's password, or x-api-key."""
    said = request.headers.get("Authorization", "")
    kind, _, rest = said.partition(" ")
    if kind.lower() == "bearer":
        return rest.strip()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return request.headers.get("x-api-key", "")


def host_of(header: str) -> str:
    """The host of a Host header, without its port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


__all__ = ["ID", "SALT", "Access"]
