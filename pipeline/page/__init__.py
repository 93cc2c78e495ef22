"""`/`: one page to try a model with: what was dropped, the answer as it is written, and what the gateway did.

One file for the browser, put together once from the files beside this one: no asset of its own route, nothing from
elsewhere.  Its policy names the very scripts and styles by their hashes, and lets the page talk to this gateway alone.
"""

import base64
import hashlib
from pathlib import Path

from aiohttp import web

from pipeline.protocols.described.models import PAGE
from pipeline.serve import Route
from pipeline.ticket import Ticket

_FOLDER = Path(__file__).resolve().parent
_SCRIPTS = ("stream.js", "facts.js", "page.js")


def page_route() -> Route:
    html, policy = page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def answer(request: web.Request, ticket: Ticket) -> web.Response:
        return web.Response(body=html, content_type="text/html", charset="utf-8", headers=headers)

    return Route("GET", "/", answer, guarded=False, about=PAGE)


def page() -> tuple[bytes, str]:
    """The page and its Content-Security-Policy."""
    style = _read("page.css")
    script = "\n".join(_read(name) for name in _SCRIPTS)
    html = _read("page.html").replace("/*{style}*/", style).replace("/*{script}*/", script)
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data: blob:",
        "media-src": "blob:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return html.encode(), "; ".join(f"{name} {value}" for name, value in policy.items())


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
