"""Each file of examples/ is run by a test: people copy examples."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


def _named(name: str, texts: str) -> bool:
    """Whether programs open a file by its name, or import it."""
    stem = name.removesuffix(".py")
    return f'"{name}"' in texts or re.search(rf"^(from|import) {stem}\b", texts, re.M) is not None


def test_each_example_is_run_by_a_test_or_used_by_an_example_that_is() -> None:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "examples"]
    output = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    examples = {ROOT / line for line in output.splitlines() if (ROOT / line).is_file()}
    assert len(examples) > 10
    tests = [*(ROOT / "tests/service").glob("*.py"), *(ROOT / "integration").glob("test_*.py")]
    texts = "\n".join(path.read_text(encoding="utf-8") for path in tests)

    run: set[Path] = set()
    while more := {path for path in examples - run if _named(path.name, texts)}:
        run |= more
        texts += "\n".join(path.read_text(encoding="utf-8") for path in more)

    assert {str(path.relative_to(ROOT)) for path in examples - run} == set()


def test_examples_import_public_names_only() -> None:
    """A name with an address inside the package may move with any release."""
    imports = {
        f"{path.name}: {module}"
        for path in (ROOT / "examples").rglob("*")
        if path.suffix in {".py", ".ipynb"} and ".ipynb_checkpoints" not in path.parts
        for module in re.findall(r"(?:from|import) (streamhouse\.[\w.]+)", path.read_text())
    }

    # `write_batch` is documented there.
    assert imports <= {"key_tables.py: streamhouse.connector"}
