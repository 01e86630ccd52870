"""The page as it is served: whole, in one document, behind the key."""

import base64
import hashlib
import re
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "jaxserve" / "server" / "page"
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
KEY = "sk-page"


@pytest.fixture(scope="module")
def guarded(start_fake):
    return start_fake("--api-key", KEY).ready()


def policy_of(response):
    parts = response.headers["content-security-policy"].split("; ")
    return {name: values.split() for name, _, values in (part.partition(" ") for part in parts)}


def inline(html, tag):
    return re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)


def source(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_page(fake):
    response = fake.http.get("/", headers=BROWSER)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert fake.http.get("/").text == response.text
    assert "{style}" not in response.text
    assert "{script}" not in response.text


def test_the_policy_allows_what_is_in_the_documents_and_no_more(fake, guarded):
    page, form = fake.http.get("/"), guarded.http.get("/", headers=BROWSER)
    policy = policy_of(page)
    assert policy_of(form) == policy
    (page_script,), (form_script,) = inline(page.text, "script"), inline(form.text, "script")
    (style,) = inline(page.text, "style")
    assert inline(form.text, "style") == [style]
    assert set(policy.pop("script-src")) == {source(page_script), source(form_script)}
    assert policy == {
        "default-src": ["'none'"],
        "style-src": [source(style)],
        "connect-src": ["'self'"],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "frame-ancestors": ["'none'"],
    }
    for html in (page.text, form.text):
        assert not re.search(r"<[^>]*\s(style|on\w+)=", html)


def test_nothing_is_asked_of_other_places(fake, guarded):
    for response in (fake.http.get("/"), guarded.http.get("/", headers=BROWSER)):
        urls = re.findall(r"[a-z]+://[^\s\"'`]+", response.text)
        assert set(urls) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"@import|url\(|import\s*\(|\bfrom\s+[\"']", response.text)
        links = re.findall(r"\s(?:src|href|action)=[\"']?([^\"'>\s]*)", response.text)
        assert links == ["data:,"]


def test_the_key_guards_it(guarded):
    for headers in ({}, {"accept": "*/*"}, {"authorization": "Bearer wrong"}):
        response = guarded.http.get("/", headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    for headers in (BROWSER, BROWSER | {"authorization": "Bearer wrong"}):
        response = guarded.http.get("/", headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert '<label for="key">API key</label>' in response.text
        assert KEY not in response.text
        assert "chat" not in response.text.replace(inline(response.text, "style")[0], "")
    for path in ("/metrics", "//", "/?x=/", "/v1/models"):
        response = guarded.http.get(path, headers=BROWSER)
        assert response.status_code == 401
    response = guarded.http.get("/", headers=BROWSER | {"authorization": f"Bearer {KEY}"})
    assert response.status_code == 200
    assert "Sampling" in response.text


def test_polls_that_go_well_are_not_logged(guarded):
    keyed = {"authorization": f"Bearer {KEY}"}
    for path in ("/metrics", "/health", "/ping", "/metrics?refused", "/version"):
        guarded.http.get(path, headers={} if "refused" in path else keyed)
    guarded.wait_for(r"GET /version 200")
    guarded.wait_for(r"GET /metrics 401")
    assert not re.search(r"GET /(metrics|health|ping) 200", guarded.log)


def test_it_is_in_the_wheel(tmp_path):
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(wheel).namelist())
    assets = {
        str(path.relative_to(ROOT)) for path in ASSETS.iterdir() if path.name != "__pycache__"
    }
    assert len(assets) >= 10
    assert assets <= names
