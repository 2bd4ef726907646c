"""What a failing disk or a hurried operator does to a data directory, one thing at a time.

Bits, lengths, missing files and directories, swapped files, earlier versions of files. What is done
is chosen by the caller's `Choose`, so that a seed or hypothesis can repeat it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Attack", "Choose", "attack", "state_files"]

Choose = Callable[[int], int]
"""Returns a number from 0 to below what it is given: `Random(seed).randrange`, or hypothesis'."""


@dataclass(frozen=True)
class Attack:
    """What was done, in words, and to which files."""

    kind: str
    files: tuple[str, ...]
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(self.files)} {self.detail}".strip()


def state_files(data_dir: Path) -> list[str]:
    """Return every file of the directory that says something, by its name below it."""
    return sorted(
        str(path.relative_to(data_dir))
        for path in data_dir.rglob("*")
        if path.is_file() and path.name not in ("LOCK", "LOG") and path.suffix != ".tmp"
    )


def attack(
    data_dir: Path, choose: Choose, *, older: Sequence[Path] = (), files: Sequence[str] = ()
) -> Attack:
    """Damage one thing below `data_dir`; `older` are earlier versions of the whole directory.

    `files` narrows what may be hit; by default every file may.
    """
    hit = list(files) or state_files(data_dir)
    name = hit[choose(len(hit))]
    kinds = [_flip, _truncate, _remove, _swap, _remove_directory, _rename_directory]
    if older:
        kinds += [_older, _older]
    kind = kinds[choose(len(kinds))]
    return kind(data_dir, name, choose, hit, older)


def _flip(
    data_dir: Path, name: str, choose: Choose, hit: Sequence[str], older: Sequence[Path]
) -> Attack:
    data = bytearray((data_dir / name).read_bytes())
    if not data:
        return _remove(data_dir, name, choose, hit, older)
    bit = choose(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    (data_dir / name).write_bytes(data)
    return Attack("flip", (name,), f"bit {bit}")


def _truncate(
    data_dir: Path, name: str, choose: Choose, hit: Sequence[str], older: Sequence[Path]
) -> Attack:
    data = (data_dir / name).read_bytes()
    size = choose(len(data)) if data else 0
    (data_dir / name).write_bytes(data[:size])
    return Attack("truncate", (name,), f"to {size} of {len(data)} bytes")


def _remove(
    data_dir: Path, name: str, choose: Choose, hit: Sequence[str], older: Sequence[Path]
) -> Attack:
    (data_dir / name).unlink()
    return Attack("remove", (name,))


def _swap(
    data_dir: Path, name: str, choose: Choose, hit: Sequence[str], older: Sequence[Path]
) -> Attack:
    """Swap with a file of the same kind, as a mixed-up restore does."""
    alike = [other for other in hit if other != name and _kind(other) == _kind(name)]
    if not alike:
        return _remove(data_dir, name, choose, hit, older)
    other = alike[choose(len(alike))]
    first, second = (data_dir / name).read_bytes(), (data_dir / other).read_bytes()
    (data_dir / name).write_bytes(second)
    (data_dir / other).write_bytes(first)
    return Attack("swap", (name, other))


def _kind(name: str) -> str:
    path = Path(name)
    return path.suffix or path.name


def _remove_directory(
    data_dir: Path, name: str, choose: Choose, hit: Sequence[str], older: Sequence[Path]
) -> Attack:
    directory = Path(name).parent
    if directory == Path():
        return _remove(data_dir, name, choose, hit, older)
    shutil.rmtree(data_dir / directory)
    return Attack("remove directory", (str(directory),))


def _rename_directory(
    data_dir: Path, name: str, choose: Choose, hit: Sequence[str], older: Sequence[Path]
) -> Attack:
    """Flip one bit of a directory's name."""
    directory = Path(name).parent
    if directory == Path():
        return _flip(data_dir, name, choose, hit, older)
    letters = bytearray(directory.name.encode())
    place = choose(len(letters))
    letters[place] ^= 1 << choose(4)
    renamed = letters.decode("ascii", "replace")
    if "/" in renamed or renamed in (".", ".."):
        return _remove(data_dir, name, choose, hit, older)
    target = (data_dir / directory).with_name(renamed)
    if target.exists():
        return _remove(data_dir, name, choose, hit, older)
    (data_dir / directory).rename(target)
    return Attack("rename", (str(directory), target.name))


def _older(
    data_dir: Path, name: str, choose: Choose, hit: Sequence[str], older: Sequence[Path]
) -> Attack:
    """Put an earlier version of the file in its place; without any it is removed."""
    now = (data_dir / name).read_bytes()
    versions = [
        folder
        for folder in older
        if (folder / name).is_file() and (folder / name).read_bytes() != now
    ]
    if not versions:
        return _remove(data_dir, name, choose, hit, older)
    folder = versions[choose(len(versions))]
    shutil.copyfile(folder / name, data_dir / name)
    return Attack("old version", (name,), f"of {folder.name}")
