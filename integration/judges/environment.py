"""Virtual environments for engines that cannot share ours.

Each lives under `.cache/judges/<name>` and is made once: a stamp holds the digest of its
requirements, so a changed requirements file makes it anew and an unchanged one costs nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from integration.judges.debian_command import CACHE, kcat

__all__ = ["judge_python"]


def judge_python(name: str) -> Path:
    """The Python of the environment that `<name>-requirements.txt` describes, made if need be.

    Safe to call from several processes at once: one makes it, the others wait.

    Raises:
        subprocess.CalledProcessError: the environment cannot be made; pip has said why.
    """
    requirements = Path(__file__).with_name(f"{name}-requirements.txt")
    wanted = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    home = CACHE / name
    python = home / "bin" / "python"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = home / ".requirements"
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(home, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
            pip = [str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)]
            subprocess.run(pip, check=True)
            stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    kcat()
    for name in ("spark35", "postgres", "cdc", "kafka"):
        judge_python(name)
