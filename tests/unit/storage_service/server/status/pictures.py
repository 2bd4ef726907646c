"""Renew the documents' pictures of the status page: `make pictures`, with Chromium."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from tests.support.chromium import chromium
from tests.unit.storage_service.server.status.status_world import page_server, status_of

_IMAGES: Final = Path(__file__).resolve().parents[5] / "docs" / "images"
# File -> fragment, height, and what is drawn last.
_PICTURES: Final = {
    "status_page": ("", 1_180, "document.querySelectorAll('#tables tbody tr').length > 0"),
    "table_page": (
        "#/billing/alerts_381",
        1_900,
        "['rows', 'columns', 'snapshots'].every(part =>"
        " document.querySelector(`#one-${part} tbody tr`) !== null)",
    ),
}


def main() -> None:
    """Draw the page of a made-up service, the same each time."""
    with (
        tempfile.TemporaryDirectory() as profile,
        page_server() as server,
        chromium(Path(profile)) as page,
    ):
        server.status = status_of(1_000)
        for name, (fragment, height, ready) in _PICTURES.items():
            page.look(width=1_440, height=height)
            page.open("about:blank")
            page.wait_for("location.href === 'about:blank'")
            page.open(server.url + fragment)
            page.wait_for("document.readyState === 'complete' && document.title !== ''")
            page.wait_for(ready)
            page.picture(_IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
