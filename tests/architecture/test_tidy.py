"""House rules that no linter checks for us. Each failure says where and what to do instead."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.architecture.source_files import (
    LIBRARY_FOLDERS,
    ROOT,
    SourceFile,
    library_files,
    source_files,
)

FILE_LINES_MAX: Final = 600
FUNCTION_LINES_MAX: Final = 70
FOLDER_FILES_MAX: Final = 15
COLUMNS_MAX: Final = 100

# What may be longer, and why. An entry that is no longer needed fails a test.
LONGER_FILES: Final[dict[str, str]] = {}
LONGER_FUNCTIONS: Final[dict[str, str]] = {}

# Started by Python, Spark or a console script, hence imported by nobody.
ENTRY_POINTS: Final = (
    "streamhouse.cli",
    "pyspark_streamhouse",
)

# A file that cannot be named for its one job has none.
NAMES_THAT_SAY_NOTHING: Final = {"utils", "util", "common", "helpers", "misc", "types", "base"}

_BLIND: Final = {"Exception", "BaseException"}
_REASONED: Final = re.compile(r"#\s*(?:noqa: BLE001\s*[-:]\s*|(?!noqa))\S.{9,}")
_LATE_IMPORT: Final = "  # noqa: PLC0415"
_REASONED_SLEEP: Final = re.compile(r"#\s*sleep: \S.{9,}")
_UNNUMBERED: Final = re.compile(r"\b(?:FIXME|TODO|XXX)\b(?!\s*\(#\d+\))")


def _functions(file: SourceFile) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _called(node: ast.AST) -> str:
    """The dotted name that a call calls, or ''."""
    if not isinstance(node, ast.Call):
        return ""
    return ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""


def _report(findings: list[str], advice: str) -> None:
    assert not findings, "\n".join([advice, *(f"  {finding}" for finding in findings)])


def test_files_are_short() -> None:
    long = {str(f): len(f.lines) for f in source_files() if len(f.lines) > FILE_LINES_MAX}

    _report(
        [f"{path}: {count} lines" for path, count in long.items() if path not in LONGER_FILES],
        f"over {FILE_LINES_MAX} lines: split by job, or give the reason in LONGER_FILES",
    )
    assert set(LONGER_FILES) <= set(long), "an entry of LONGER_FILES is no longer needed"


def test_folders_are_small() -> None:
    files = Counter(file.path.parent for file in library_files())

    _report(
        [f"{path}: {count} files" for path, count in files.items() if count > FOLDER_FILES_MAX],
        f"over {FOLDER_FILES_MAX} files: what belongs together gets a folder with a name",
    )


def test_functions_are_short() -> None:
    long = {
        f"{file}::{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for file in source_files()
        for node in _functions(file)
        if (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES_MAX
    }

    _report(
        [f"{name}: {count} lines" for name, count in long.items() if name not in LONGER_FUNCTIONS],
        f"over {FUNCTION_LINES_MAX} lines: split it, or give the reason in LONGER_FUNCTIONS",
    )
    assert set(LONGER_FUNCTIONS) <= set(long), "an entry of LONGER_FUNCTIONS is no longer needed"


def test_lines_fit() -> None:
    scripts = [SourceFile(Path(name)) for name in ("Makefile", ".ci/run", "setup.cfg")]

    _report(
        [
            f"{file}:{number}: {len(line)} columns"
            for file in (*source_files(), *scripts)
            for number, line in enumerate(file.lines, 1)
            if len(line.partition(_LATE_IMPORT)[0]) > COLUMNS_MAX and "noqa: E501" not in line
        ],
        f"over {COLUMNS_MAX} columns",
    )


def test_libraries_do_not_print() -> None:
    _report(
        [
            f"{file}:{node.lineno}"
            for file in library_files()
            if not file.module.startswith("streamhouse.cli")
            for node in file.nodes
            if isinstance(node, ast.Call) and _called(node) == "print"
        ],
        "print in a library: use the module's logger",
    )


def test_nothing_raises_a_bare_exception() -> None:
    _report(
        [
            f"{file}:{node.lineno}"
            for file in library_files()
            for node in file.nodes
            if isinstance(node, ast.Raise) and node.exc is not None
            if _called(node.exc) in _BLIND or ast.unparse(node.exc) in _BLIND
        ],
        "raise a class of streamhouse.core.errors",
    )


def test_catching_everything_has_its_reason_beside_it() -> None:
    _report(
        [
            f"{file}:{node.lineno}"
            for file in library_files()
            for node in file.nodes
            if isinstance(node, ast.ExceptHandler)
            if node.type is None or ast.unparse(node.type) in _BLIND
            # What raises again, as an error of ours or as it came, hides nothing (ruff agrees).
            if not isinstance(node.body[-1], ast.Raise)
            if not _REASONED.search(file.lines[node.lineno - 1])
        ],
        "catch what you can handle; an outermost loop says why on that line",
    )


def test_imports_inside_functions_have_their_reason_beside_them() -> None:
    _report(
        [
            f"{file}:{number}"
            for file in library_files()
            for number, line in enumerate(file.lines, 1)
            if "PLC0415" in line
            if not line.partition(f"{_LATE_IMPORT} - ")[2][9:]
        ],
        "say on the line why the import waits: `# noqa: PLC0415 - sqlglot is an extra`",
    )


def test_tests_do_not_sleep() -> None:
    _report(
        [
            f"{file}:{node.lineno}"
            for file in source_files()
            if file.path.parts[0] in ("tests", "integration")
            for node in file.nodes
            if isinstance(node, ast.Call) and _called(node) in ("time.sleep", "sleep")
            if not _REASONED_SLEEP.search(file.lines[node.lineno - 1])
        ],
        "wait for the event itself (Event.wait, long poll); the pause of a polling loop against"
        " another process says `# sleep: <why>` on that line",
    )


def test_what_is_left_to_do_has_an_issue() -> None:
    _report(
        [
            f"{file}:{number}: {line.strip()}"
            for file in source_files()
            if file.path.name != "test_tidy.py"
            for number, line in enumerate(file.lines, 1)
            if _UNNUMBERED.search(line)
        ],
        "write `TODO(#12)` with the issue's number, or do it now",
    )


def test_every_library_module_says_what_it_is_for() -> None:
    _report(
        [str(file) for file in library_files() if not ast.get_docstring(file.tree)],
        "no module docstring: job, invariants, what is left to others",
    )


def test_files_are_named_for_their_job() -> None:
    _report(
        [str(file) for file in source_files() if file.path.stem in NAMES_THAT_SAY_NOTHING],
        "name the file for its one job",
    )


def test_every_library_folder_is_a_package() -> None:
    """Setuptools' `find:` leaves out a folder without `__init__.py`, from the wheel only."""
    folders = {file.path.parent for file in library_files()}

    _report(
        [
            str(folder)
            for folder in sorted(folders)
            if str(folder) != "src" and not (ROOT / folder / "__init__.py").exists()
        ],
        "no __init__.py: the wheel would lack this folder",
    )


def test_every_library_module_is_used() -> None:
    used: set[str] = set()
    for file in library_files():
        used |= file.imports
        # Names loaded on demand are strings.
        used |= {
            node.value
            for node in file.nodes
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith("streamhouse.")
        }

    _report(
        [
            str(file)
            for file in library_files()
            if file.path.name not in ("__init__.py", "__main__.py")
            and file.module not in used
            and file.module not in ENTRY_POINTS
        ],
        "no other module imports it: wire it in, or delete it",
    )


@pytest.mark.parametrize("folder", [name for name in LIBRARY_FOLDERS if name != "src"])
def test_links_lead_to_the_top_level_folders(folder: str) -> None:
    link = ROOT / "src" / "streamhouse" / folder

    assert link.is_symlink()
    assert link.resolve() == (ROOT / folder).resolve()


def test_nothing_that_is_ignored_is_committed() -> None:
    """As a link to another tree's `.venv`: git would put it in the place of the folder there."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("this is no repository of git's")
    listed = subprocess.run(
        [git, "ls-files", "--cached", "--ignored", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    _report(listed.stdout.splitlines(), "Take out of the index (git rm --cached):")
