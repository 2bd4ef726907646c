"""The page at `/`: one file, no data in it; its script asks `/v1/status` with the token."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re
from typing import Final

from fastapi.responses import Response

__all__ = ["status_page"]

_HTML: Final = (
    importlib.resources.files(__package__).joinpath("page", "status.html").read_text("utf-8")
)


def _policy(html: str) -> str:
    """Allow the page's own script, by its digest, and requests to this service: nothing else."""
    scripts = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    digests = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts
    ]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_HEADERS: Final = {
    "Content-Security-Policy": _policy(_HTML),
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def status_page() -> Response:
    """Return the page."""
    return Response(_HTML, media_type="text/html; charset=utf-8", headers=_HEADERS)
