"""What long commands show of how far they are, and that nothing of it is in what they print."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from streamhouse.cli.progress_bar import ProgressBar
from streamhouse.storage_service.operations.backup_files import (
    restore_backup,
    verify_backup,
    write_backup,
)
from tests.support.seen_progress import SeenProgress

FACTS = {"data_dir": "/data", "created_at_us": 0, "streamhouse_version": "1", "with_lake": False}


def _backup(folder: Path, seen: SeenProgress) -> Path:
    staged = folder / "staged"
    for number in range(3):
        file = staged / "tables" / f"{number}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * (9 << 20 if number == 0 else number))
    write_backup(staged, folder / "backup", FACTS, progress=seen)
    return folder / "backup"


def test_what_is_done_of_a_backup_comes_to_what_was_expected(tmp_path: Path) -> None:
    """A large file in steps."""
    made, verified, restored = SeenProgress(), SeenProgress(), SeenProgress()

    backup = _backup(tmp_path, made)
    verify_backup(backup, progress=verified)
    restore_backup(backup, tmp_path / "back", progress=restored)

    for seen in (made, verified, restored):
        assert seen.expected == sum(seen.steps) == (9 << 20) + 3
        assert len(seen.steps) == 4


def _on_terminal(code: str) -> tuple[str, str]:
    """Run Python with a terminal as stderr; return what it wrote there, and to stdout."""
    terminal, its = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(terminal, 1 << 16):
                shown.append(piece)
        except OSError:
            return

    reader = threading.Thread(target=read)
    reader.start()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=its,
        env=environment,
        check=True,
    )
    os.close(its)
    reader.join()
    os.close(terminal)
    return b"".join(shown).decode(), done.stdout.decode()


VERIFY = "from streamhouse.cli import cli; cli(['restore', '--from', {path!r}, '--json', *{more}])"


def test_a_terminal_has_a_bar_unless_it_is_quiet(tmp_path: Path) -> None:
    """What is printed meanwhile goes where it would go."""
    backup = _backup(tmp_path, SeenProgress())

    shown, printed = _on_terminal(VERIFY.format(path=str(backup), more=[]))
    quiet, the_same = _on_terminal(VERIFY.format(path=str(backup), more=["--quiet"]))

    assert "verifying" in shown
    assert quiet == ""
    assert printed == the_same
    assert '"is_restored": false' in printed


def test_what_is_no_terminal_has_no_bar(capfd: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("working", is_quiet=False, unit="rows") as bar:
        bar.expect(5)
        bar.done(5)
        sys.stdout.write("said\n")

    assert capfd.readouterr() == ("said\n", "")
