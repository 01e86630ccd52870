"""One HTML document with its style and script inside: nothing else has to be asked for, so that
nothing else has to be guarded.

The files beside this one are what it is made of. The script is one module, made of its files in
their order.
"""

import base64
import functools
import hashlib
from importlib.resources import files

from starlette.responses import HTMLResponse, Response

_SCRIPTS = ("api.js", "metrics.js", "plot.js", "engine.js", "chat.js", "main.js")


def page_response() -> Response:
    return HTMLResponse(_page(), headers=_headers())


def sign_in_response() -> Response:
    """401 with a form that asks for the key, and loads the page with it."""
    headers = {**_headers(), "WWW-Authenticate": "Bearer"}
    return HTMLResponse(_sign_in(), 401, headers=headers)


@functools.cache
def _page() -> str:
    return _fill("page.html", _style(), _script())


@functools.cache
def _sign_in() -> str:
    return _fill("sign_in.html", _style(), _read("sign_in.js"))


def _fill(name: str, style: str, script: str) -> str:
    return _read(name).replace("{style}", style).replace("{script}", script)


def _style() -> str:
    return _read("style.css")


def _script() -> str:
    return "\n".join(_read(name) for name in _SCRIPTS)


def _read(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")


@functools.cache
def _headers() -> dict[str, str]:
    """The form becomes the page under its own policy, so that both have one."""
    scripts = " ".join(map(_source, (_script(), _read("sign_in.js"))))
    policy = {
        "default-src": "'none'",
        "script-src": scripts,
        "style-src": _source(_style()),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _source(text: str) -> str:
    """The text's hash, as a policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
