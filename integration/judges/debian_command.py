"""Commands of Debian's packages, unpacked below `.cache/judges` without being installed.

They need nothing but `apt-get download`, which no rights are needed for. Where that does not work,
as on another system or without a network, there is no such command, and its judge is passed over.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["CACHE", "DebianCommand", "kcat"]

CACHE: Final = Path(__file__).resolve().parents[2] / ".cache" / "judges"
"""Where what judges run with is kept."""

_TIMEOUT_S: Final = 120
_NO_WAITING: Final = ("-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=20")


@dataclass(frozen=True, slots=True)
class DebianCommand:
    """A program, and the environment in which it finds its libraries."""

    path: str
    environment: Mapping[str, str]

    def works(self, *arguments: str) -> bool:
        """Whether it runs with these arguments: its libraries are there."""
        try:
            done = subprocess.run(
                [self.path, *arguments], env=self.environment, capture_output=True, check=False
            )
        except OSError:
            return False
        return done.returncode == 0


def kcat() -> DebianCommand | None:
    """Return kcat: the machine's own, or Debian's, fetched if need be; None if there is none."""
    return _command("kcat", ["kcat", "librdkafka1", "libyajl2"], "-V")


def _command(name: str, packages: Sequence[str], *says_version: str) -> DebianCommand | None:
    """Return a command of some packages. Several processes may call: one fetches, others wait."""
    own = shutil.which(name)
    if own is not None:
        return DebianCommand(own, os.environ)
    home = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _unpacked(home, name)
        if not found.works(*says_version) and _fetch(home, packages):
            found = _unpacked(home, name)
        return found if found.works(*says_version) else None


def _unpacked(home: Path, name: str) -> DebianCommand:
    libraries = ":".join(str(folder) for folder in sorted(home.glob("usr/lib/*-linux-gnu*")))
    return DebianCommand(
        str(home / "usr" / "bin" / name), {**os.environ, "LD_LIBRARY_PATH": libraries}
    )


def _fetch(home: Path, packages: Sequence[str]) -> bool:
    """Unpack packages into a folder; return False if there is no way to get them."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return False
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    try:
        download = ["apt-get", *_NO_WAITING, "download", *packages]
        subprocess.run(download, cwd=home, capture_output=True, check=True, timeout=_TIMEOUT_S)
        for archive in sorted(home.glob("*.deb")):
            subprocess.run(["dpkg", "-x", str(archive), str(home)], check=True)
    except (subprocess.SubprocessError, OSError):
        return False
    return True
