"""Run every benchmark, each in a process of its own, and write benchmarks/RESULTS.md."""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import RESULT_PREFIX

_HERE: Final = Path(__file__).parent
_VERDICTS: Final = {True: "reached", False: "**missed**", None: "not judged"}
_RESULTS: Final = _HERE / "RESULTS.md"
_INTRODUCTION: Final = """# Results

Written by `make bench` (`python -m benchmarks.run`). Each row is one run on one machine: `measured`
against `limit` (what the hardware or the bare library did in the same run), and their ratio against
the bar we set ourselves. Absolute figures are this machine's; ratios carry over. One benchmark:
`python -m benchmarks.NAME`. `make peers` writes the section of small calls with a peer beside us.

"""


def main(names: list[str]) -> int:
    """Run the benchmarks called `names`, or all; return how many failed to run.

    The results of named ones replace theirs in RESULTS.md, each with the commit it ran on. What
    people wrote below a section's first table stays.
    """
    former = _sections_so_far()
    sections = {} if not names else dict(former)
    failures = 0
    for module in names or _all_names():
        started, load = time.perf_counter(), os.getloadavg()[0]
        results, exit_code = _run(module)
        failures += exit_code != 0
        seconds = time.perf_counter() - started
        ran = f"commit {_commit()}, {seconds:.0f} s, load {load:.1f}"
        section = _section(module, results, ran, exit_code)
        sections[module] = section + _notes(former.get(module, ""))
    ordered = [text for _, text in sorted(sections.items())]
    _RESULTS.write_text(_INTRODUCTION + _machine() + "\n".join(ordered))
    return failures


def _all_names() -> list[str]:
    return sorted(path.stem for path in _HERE.glob("bench_*.py"))


def _sections_so_far() -> dict[str, str]:
    if not _RESULTS.exists():
        return {}
    _, *sections = _RESULTS.read_text().split("\n## ")
    return {text.partition("\n")[0]: f"## {text.rstrip()}\n" for text in sections}


def _run(module: str) -> tuple[list[dict[str, Any]], int]:
    results = []
    command = [sys.executable, "-m", f"benchmarks.{module}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(RESULT_PREFIX):
                results.append(json.loads(line.removeprefix(RESULT_PREFIX)))
            else:
                sys.stdout.write(line)
                sys.stdout.flush()
    return results, process.returncode


def _notes(section: str) -> str:
    """Return what stands below the first table of a section."""
    lines = section.split("\n")
    rows = [number for number, line in enumerate(lines) if line.startswith("| --- ")]
    if not rows:
        return ""
    below = itertools.dropwhile(lambda line: line.startswith("|"), lines[rows[0] :])
    notes = "\n".join(below).strip("\n")
    return f"\n{notes}\n" if notes else ""


def _section(module: str, results: list[dict[str, Any]], ran: str, exit_code: int) -> str:
    command = f"`python -m benchmarks.run {module}`, {ran}"
    lines = [f"## {module}", "", _what(module), "", command, ""]
    if exit_code:
        lines += [f"**The run failed with exit code {exit_code}.**", ""]
    lines += [
        "| figure | measured | limit | ratio | bar | |",
        "| --- | --- | --- | --: | --- | --- |",
    ]
    lines += [
        f"| {r['name']} | {r['measured']} | {r['limit']} | {r['ratio']:.2f} | {r['bar']} |"
        f" {_VERDICTS[r['reached']]} |"
        for r in results
    ]
    return "\n".join([*lines, ""])


def _what(module: str) -> str:
    """Return what a benchmark compares, as it says itself, in one line."""
    said = ast.get_docstring(ast.parse((_HERE / f"{module}.py").read_text())) or ""
    return " ".join(said.split())


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    ran = subprocess.run(command, cwd=_HERE, capture_output=True, text=True, check=False)
    return ran.stdout.strip() or "unknown"


def _machine() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("pyspark", "pyarrow", "pyiceberg"))
    return (
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, {os.cpu_count()} cores,"
        f" {platform.machine()}, Python {platform.python_version()}, {packages}. The machine is"
        " shared: other load moves single figures.\n\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="one of: " + ", ".join(_all_names())
    )
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in _all_names():
            parser.error(f"there is no benchmark '{name}'; there are {', '.join(_all_names())}")
    sys.exit(main(arguments.names))
