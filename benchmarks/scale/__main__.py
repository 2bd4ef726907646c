"""Write docs/scale.md, docs/capacity.md and the table of PUTs in docs/journal.md."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from benchmarks.scale.capacity import capacity_page
from benchmarks.scale.page import scale_page, with_puts_table

_DOCS: Final = Path(__file__).parents[2] / "docs"


def main() -> None:
    """Write all of them."""
    (_DOCS / "capacity.md").write_text(capacity_page())
    (_DOCS / "scale.md").write_text(scale_page())
    journal = _DOCS / "journal.md"
    journal.write_text(with_puts_table(journal.read_text()))


if __name__ == "__main__":
    main()
