"""Write docs/scale.md and the table of PUTs in docs/operations.md."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from benchmarks.scale.page import scale_page, with_puts_table

_DOCS: Final = Path(__file__).parents[2] / "docs"


def main() -> None:
    """Write both."""
    (_DOCS / "scale.md").write_text(scale_page())
    operations = _DOCS / "operations.md"
    operations.write_text(with_puts_table(operations.read_text()))


if __name__ == "__main__":
    main()
