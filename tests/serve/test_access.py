"""Who may ask: keys, hosts, other sites."""

import base64

import pytest
from live_server import scripted_server

CHAT = {"messages": [{"role": "user", "content": "SAY hi"}]}
PATHS = ("/", "/v1/models", "/metrics", "/version", "/v1/live", "/nowhere", "/%2e%2e/health")


@pytest.fixture(scope="module")
def keyed(tiny_path):
    with scripted_server(
        tiny_path, keys=("first-key", "other-kéy"), origins=("http://ok.example",)
    ) as s:
        yield s


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_every_route_but_health_needs_a_key(keyed):
    assert keyed.ask("GET", "/health")[0] == 200
    for path in PATHS:
        status, found, headers = keyed.ask("GET", path)
        assert status == 401 and found["error"]["code"] == "invalid_api_key", path
        assert "WWW-Authenticate" in headers
    for path in ("/v1/chat/completions", "/tokenize", "/v1/messages"):
        assert keyed.ask("POST", path, CHAT)[0] == 401
    status, found, _ = keyed.ask("POST", "/v1/messages", CHAT)
    assert found["type"] == "error" and found["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("key", ["", "first", "first-keyy", "first-key other-kéy", "Bearer"])
def test_wrong_keys(keyed, key):
    headers = {"Authorization": f"Bearer {key}".encode()}
    assert keyed.ask("GET", "/v1/models", headers=headers)[0] == 401


def test_right_keys(keyed):
    assert keyed.ask("GET", "/v1/models", headers=bearer("first-key"))[0] == 200
    assert keyed.ask("GET", "/v1/models", headers={"x-api-key": "first-key"})[0] == 200
    basic = base64.b64encode(b"anyone:first-key").decode()
    assert keyed.ask("GET", "/v1/models", headers={"Authorization": f"Basic {basic}"})[0] == 200
    key = {"Authorization": "Bearer other-kéy".encode()}
    assert keyed.ask("GET", "/v1/models", headers=key)[0] == 200
    assert keyed.ask("POST", "/v1/chat/completions", CHAT, bearer("first-key"))[0] == 200


def test_keys_have_salts_of_their_own(keyed, monkeypatch):
    seen = []
    add = keyed.server.engine.add
    monkeypatch.setattr(
        keyed.server.engine, "add", lambda one: (seen.append(one.spec["salt"]), add(one))
    )
    for key in ("first-key", "first-key", "other-kéy"):
        headers = {"Authorization": f"Bearer {key}".encode()}
        assert keyed.ask("POST", "/v1/chat/completions", CHAT, headers)[0] == 200
    assert seen[0] == seen[1] != seen[2] and len(seen[0]) == 32


def test_other_hosts_and_sites(scripted, keyed):
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", "", "[", "1.2.3.4"):
        assert scripted.ask("GET", "/v1/models", headers={"Host": host})[0] == 403, host
    for host in ("localhost", "127.0.0.1:9", "[::1]:80", "a.localhost"):
        assert scripted.ask("GET", "/v1/models", headers={"Host": host})[0] == 200, host
    foreign = {"Origin": "http://evil.example"}
    assert scripted.ask("POST", "/v1/chat/completions", CHAT, foreign)[0] == 403
    own = {"Origin": scripted.url}
    assert scripted.ask("POST", "/v1/chat/completions", CHAT, own)[0] == 200
    allowed = {"Origin": "http://ok.example"}
    status, _, headers = keyed.ask("OPTIONS", "/v1/chat/completions", None, allowed)
    assert status == 204 and headers["Access-Control-Allow-Origin"] == "http://ok.example"
    status, _, headers = keyed.ask(
        "POST", "/v1/chat/completions", {**CHAT, "stream": True}, allowed | bearer("first-key")
    )
    assert status == 200 and headers["Access-Control-Allow-Origin"] == "http://ok.example"
    assert keyed.ask("OPTIONS", "/v1/chat/completions", None, foreign)[0] == 403
