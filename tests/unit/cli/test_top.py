"""`streamhouse top` and its tables at the edges: a small terminal, a pipe, the key q."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner

from streamhouse.cli import cli
from tests.support.canned_service import canned_service

LONG: Final = "warehouse_of_the_north.orders_of_the_shops_by_day_and_hour"
COMMAND: Final = (sys.executable, "-c", "from streamhouse.cli import main; main()")
_TIMEOUT_S: Final = 60


def _table(name: str, *, lag_ms: int = 0) -> dict[str, Any]:
    return {
        "table": name,
        "row_count": 123_456_789,
        "log_bytes": 123_456_789_000,
        "written_rows_per_s": 12_345.6,
        "read_rows_per_s": 12_345.6,
        "is_tiered": True,
        "freshness_ms": 180_000,
        "lag_ms": lag_ms,
        "tiering": {"last_error": "the catalog is away " * 9} if lag_ms else {},
        "unusable": [],
        "history": {"written_rows_per_s": []},
    }


CONSUMER: Final = {
    "name": "a_reader_with_a_long_name_" * 4,
    "lag_rows": 12,
    "lag_ms": None,
    "rows_at_risk": 0,
    "reported_us": 1_700_000_000_000_000,
}
STATUS: Final = {
    "sample_interval_ms": 100,
    "table_count": 61,
    "workers": [],
    "idle_workers": [],
    "damaged_tables": [],
    "strangers": [],
    "consumers": {"count": 1, "worst": [{"table": LONG, **CONSUMER}]},
    "tables": [
        *(_table(f"shop.t{number}") for number in range(60)),
        _table(LONG, lag_ms=7_200_000),
    ],
}
ANSWERS: Final = {
    "/v1/status": STATUS,
    "/v1/tables": {"tables": [LONG]},
    f"/v1/tables/{LONG}/consumers": {"consumers": [CONSUMER]},
}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with canned_service(ANSWERS) as url:
        yield url


def _environment(endpoint: str) -> dict[str, str]:
    names = {"STREAMHOUSE_ENDPOINT": endpoint, "TERM": "xterm", "NO_COLOR": "1"}
    return {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | names


def _read_until(terminal: int, pattern: str) -> str:
    text = ""
    while not re.search(pattern, text):
        assert select.select([terminal], [], [], _TIMEOUT_S)[0], text
        text += os.read(terminal, 1 << 16).decode()
    return text


def test_a_small_terminal_shows_late_tables_first_and_whole_figures_until_q(endpoint: str) -> None:
    terminal, other_end = pty.openpty()
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    top = subprocess.Popen(
        [*COMMAND, "top"],
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        env=_environment(endpoint),
    )
    os.close(other_end)
    try:
        text = _read_until(terminal, r"q or Ctrl-C ends")
        os.write(terminal, b"xq")
        assert top.wait(_TIMEOUT_S) == 0
    finally:
        top.kill()
        top.wait()
        os.close(terminal)

    picture = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line.rstrip() for line in picture.splitlines() if line.strip()]
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    late, second = (line for line in lines[2:4])
    # The name is cut, and no figure.
    assert late.startswith("warehouse_of")
    assert "…" in late
    assert late.split()[-2:] == ["3", "min"]
    assert "2 h" in late
    assert "115.0 GiB" in late
    assert second.startswith("shop.t0")
    assert re.search(r"and \d+ more tables", picture)
    assert "the catalog is away" in picture


@pytest.mark.parametrize("arguments", [["top"], ["top", "--once"], ["consumers"]])
def test_a_pipe_gets_whole_names(endpoint: str, arguments: list[str]) -> None:
    """`top` prints one picture after the other, and ends when its reader has gone."""
    command = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(endpoint),
    )
    assert command.stdout is not None
    assert command.stderr is not None
    with command:
        text, pictures = "", 0
        for line in command.stdout:
            text += line
            pictures += LONG in line and str(CONSUMER["name"]) in line
            if arguments == ["top"] and pictures == 2:
                command.stdout.close()
                break
        errors = command.stderr.read()
        exit_code = command.wait(_TIMEOUT_S)

    assert (errors, exit_code) == ("", 141 if arguments == ["top"] else 0)
    assert pictures
    assert "…" not in text


def test_the_head_of_a_long_output_ends_the_command_without_a_word(
    endpoint: str, tmp_path: Path
) -> None:
    """Also if the reader has gone before the first line."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*COMMAND, "top", "--once"],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=subprocess.PIPE,
            env=_environment(endpoint),
            cwd=tmp_path,
            timeout=_TIMEOUT_S,
            check=False,
        )
    finally:
        os.close(writing)

    assert (done.stderr, done.returncode) == (b"", 141)


@pytest.mark.parametrize("width", [24, 40, 50, 58, 62, 70])
def test_a_narrow_terminal_cuts_names_and_no_figure(endpoint: str, width: int) -> None:
    arguments = ["top", "--once", "--filter", "warehouse*", "--endpoint", endpoint]

    done = CliRunner().invoke(cli, arguments, env={"COLUMNS": str(width)})

    heading, _, late = done.stdout.splitlines()[:3]
    assert late.startswith("war")
    assert late.count("…") == 1
    assert "lake lag" in heading
    assert "2 h" in late
    # Two figures of rows per second.
    figures = {"rows": "123 M", "written/s": "12.3 k", "log": "115.0 GiB", "wanted": "3 min"}
    assert all((name in heading) == (figure in late) for name, figure in figures.items())
    assert ("wanted" in heading) == (width >= 62)
