"""Keys, request ids, cross-origin requests and the log."""

import json
import re
import socket
import time

import pytest

KEY, OTHER = "sk-secret-1", "sk-secret-2"
ORIGIN = "https://example.org"
PATHS = ["/", "/v1/models", "/v1/completions", "/metrics", "/version", "/openapi.json", "/nothing"]


@pytest.fixture(scope="module")
def guarded(start_fake, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{OTHER}\n")
    return start_fake(
        "--api-key", KEY, "--api-key-file", str(keys), "--allowed-origins", ORIGIN,
        "--log-format", "json",
    ).ready()  # fmt: skip


def raw(server, request_line, *headers):
    """The status of a request that no client library would send like this."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        lines = [request_line, "Host: x", "Connection: close", *headers, "", ""]
        connection.sendall("\r\n".join(lines).encode())
        return int(connection.makefile("rb").readline().split()[1])


def sent(server, text):
    """The status that the server answers before it hangs up; None if none came."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        try:
            for start in range(0, len(text), 16_384):
                connection.sendall(text[start : start + 16_384].encode())
                time.sleep(0.002)
            line = connection.makefile("rb").readline()
        except ConnectionError:
            return None
    return int(line.split()[1]) if line else None


def answer(server, text):
    """What the server says to a text before it hangs up: status, head and body."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(text.encode("latin-1"))
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode("latin-1"), body


def test_every_key_opens(guarded):
    for key in (KEY, OTHER):
        response = guarded.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200
    response = guarded.http.get("/v1/models", headers={"authorization": f"bearer {KEY}"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "header",
    ["", KEY, f"Basic {KEY}", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}",
     f"Bearer {KEY.upper()}", f"Bearer {KEY} {KEY}", "Bearer \xff"],
)  # fmt: skip
def test_nothing_else_does(guarded, header):
    headers = {"authorization": header.encode("latin-1")} if header else {}
    response = guarded.http.get("/v1/models", headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"])
@pytest.mark.parametrize("path", PATHS)
def test_no_method_goes_round_the_key(guarded, method, path):
    assert raw(guarded, f"{method} {path} HTTP/1.1") == 401


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/V1/MODELS", "/v1//models", "/v1/models/", "/health/../v1/models",
     "/ping/../v1/models", "/%76%31/models", "/health%2f..%2fv1/models", "/health/", "//health",
     "/HEALTH", "/v1/models?x=/health", "/v1/models#/health", "/v1/models;/health",
     "http://x/v1/models"],
)  # fmt: skip
def test_no_spelling_goes_round_the_key(guarded, path):
    assert raw(guarded, f"GET {path} HTTP/1.1") in (400, 401)


def test_health_needs_no_key(guarded):
    for path in ("/health", "/ping"):
        assert guarded.http.get(path).status_code == 200


@pytest.mark.parametrize(
    "head",
    ["GET /health?" + "x" * 400_000 + " HTTP/1.1\r\nHost: x\r\n",
     "GET /health HTTP/1.1\r\nHost: x\r\n" + "X-Many: 1\r\n" * 40_000,
     "GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + "x" * 400_000 + "\r\n"],
    ids=["line", "many", "long"],
)  # fmt: skip
def test_a_head_without_an_end_is_bounded(guarded, head):
    # The answer is lost where the server hangs up before all has been sent.
    assert sent(guarded, head) in (431, None)
    assert guarded.http.get("/health").status_code == 200


def test_a_head_in_one_piece_is_bounded(guarded):
    response = guarded.http.get("/health", headers={"x-long": "x" * 65_536})
    assert response.status_code == 431
    assert "at most 65536 bytes" in response.json()["error"]["message"]
    assert guarded.http.get("/health", headers={"x-long": "x" * 65_000}).status_code == 200


@pytest.mark.parametrize(("num_bytes", "expected"), [(65_000, 200), (65_530, 431), (70_000, 431)])
def test_a_request_line_in_one_piece_is_bounded(guarded, num_bytes, expected):
    line = f"GET /health?{'x' * num_bytes} HTTP/1.1\r\n"
    status, _, body = answer(guarded, line + "Host: x\r\nConnection: close\r\n\r\n")
    assert status == expected
    assert expected == 200 or b"at most 65536 bytes" in body


@pytest.mark.parametrize("num_bytes", [65_536, 65_537])
@pytest.mark.parametrize("filler", ["", "a: b\r\n" * 10_000], ids=["long", "many"])
def test_all_of_a_head_counts(guarded, filler, num_bytes):
    lines = f"GET /health?x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{filler}X-Long: "
    lines += "x" * (num_bytes - len(lines) - 2) + "\r\n"
    status, _, _ = answer(guarded, lines + "\r\n")
    assert status == (200 if num_bytes <= 65_536 else 431)


POST = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def test_a_trailer_is_bounded(fake):
    body = "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    assert sent(fake, POST + body + "X-Many: 1\r\n" * 100_000) in (431, None)
    assert fake.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "text",
    ["\x16\x03\x01\x02\x00\x01\x00\x01", "hello\r\n\r\n", "GET /health\xff HTTP/1.1\r\n\r\n",
     "GET /health HTTP/1.1\r\nno colon\r\n\r\n",
     POST + "Transfer-Encoding: chunked\r\n\r\nno length\r\n"],
    ids=["tls", "words", "path", "header", "body"],
)  # fmt: skip
def test_what_is_no_http_hears_so_in_openais_shape(fake, text):
    status, head, body = answer(fake, text)
    assert status == 400
    assert "content-type: application/json" in head
    assert json.loads(body)["error"] == {
        "message": "what came is no valid HTTP/1.1 request",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


def test_an_answer_that_has_begun_has_no_other_in_it(fake):
    body = json.dumps({"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": True})
    host, port = fake.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"{POST}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        lines = connection.makefile("rb")
        assert lines.readline() == b"HTTP/1.1 200 OK\r\n"
        connection.sendall(b"hello\r\n\r\n")
        rest = lines.read()
    assert b"HTTP/1.1" not in rest
    assert b"[DONE]" not in rest


def test_cross_origin(guarded, fake):
    preflight = {"origin": ORIGIN, "access-control-request-method": "POST"}
    response = guarded.http.options("/v1/completions", headers=preflight)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    response = guarded.http.options("/v1/completions", headers=preflight | {"origin": "https://x"})
    assert "access-control-allow-origin" not in response.headers
    response = fake.http.options("/v1/completions", headers=preflight)
    assert "access-control-allow-origin" not in response.headers
    response = fake.http.get("/health", headers=preflight)
    assert "access-control-allow-origin" not in response.headers


def test_request_ids(fake):
    ids = set()
    for _ in range(2):
        response = fake.http.post(
            "/v1/completions", json={"prompt": "ab"}, headers={"x-request-id": "mine"}
        )
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["id"].startswith("cmpl-mine-")
        ids.add(response.json()["id"])
    assert len(ids) == 2
    for bad in ("a b", "x" * 129, "é", "<script>"):
        response = fake.http.get("/health", headers={"x-request-id": bad.encode("latin-1")})
        assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
    assert fake.http.get("/nothing").headers["x-request-id"]


def test_the_log_is_json_and_keeps_prompts_and_keys_to_itself(guarded):
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "logged"}
    body = {"prompt": "very private", "max_tokens": 8}
    assert guarded.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    guarded.http.post("/v1/completions", json={"prompt": {"very": "private"}}, headers=headers)
    guarded.wait_for(r'"status": 400')
    for line in guarded.log.splitlines():
        json.loads(line)
    entry = next(json.loads(line) for line in guarded.lines if '"logged-' in line)
    assert (entry["method"], entry["path"], entry["status"]) == ("POST", "/v1/completions", 200)
    assert entry["seconds"] > 0
    assert "private" not in guarded.log
    assert "secret" not in guarded.log


def test_no_path_forges_a_line_of_the_log(fake):
    assert raw(fake, "GET /a%0aforged%20line HTTP/1.1") == 404
    fake.wait_for(r"GET /a%0aforged%20line 404")
    assert "\nforged" not in fake.log
