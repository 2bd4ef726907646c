"""Every Spark setting that we ship has its reason above it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.source_files import ROOT

FILES = sorted((ROOT / "spark_conf").glob("*.conf"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_key_says_why(path: Path) -> None:
    lines = path.read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if line.startswith("spark.")]

    assert keys
    for number in keys:
        assert lines[number - 1].startswith("# "), f"{path.name}: {lines[number]} has no reason"


def test_the_readme_names_every_file() -> None:
    readme = (ROOT / "spark_conf" / "README.md").read_text()

    for path in (ROOT / "spark_conf").iterdir():
        assert path.name == "README.md" or f"`{path.name}`" in readme
