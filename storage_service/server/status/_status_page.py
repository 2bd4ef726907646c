"""The status page: one file, put together once from the parts in `page/`.

The page contains no data: the script on the page fetches `/v1/status` with the token.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re
from typing import Final

from fastapi.responses import Response

__all__ = ["status_page"]


def _page() -> str:
    """Return the page, with the parts inserted into the outline."""
    folder = importlib.resources.files(__package__).joinpath("page")
    html = folder.joinpath("status.html").read_text("utf-8")
    return re.sub(
        r"/\* (\w+\.(?:css|js)) \*/", lambda part: folder.joinpath(part[1]).read_text("utf-8"), html
    )


def _digests(html: str, tag: str) -> str:
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def _policy(html: str) -> str:
    """Allow the page's own script and style, by digest, and requests to this service."""
    return (
        f"default-src 'none'; script-src {_digests(html, 'script')};"
        f" style-src {_digests(html, 'style')}; img-src data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_HTML: Final = _page()
_HEADERS: Final = {
    "Content-Security-Policy": _policy(_HTML),
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def status_page() -> Response:
    """Return the page."""
    return Response(_HTML, media_type="text/html; charset=utf-8", headers=_HEADERS)
