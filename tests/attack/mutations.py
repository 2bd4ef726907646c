"""What time, disks and people do to the files of a data directory, one damage a case."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.attack.world import World

__all__ = ["Damage", "damage_directory", "kind_of"]

# What a path below the data directory is, first match first. A file that fits none fails the run:
# whoever adds a kind of file says here what it is.
_KINDS: Final = (
    ("lock", r"LOCK"),
    ("service.json", r"service\.json"),
    ("table.json", r"tables/[^/]+/table\.json"),
    ("lake.json", r"tables/[^/]+/lake\.json"),
    ("lake_pins.json", r"tables/[^/]+/lake_pins\.json"),
    ("consumers.json", r"tables/[^/]+/consumers\.json"),
    ("row_ages.json", r"tables/[^/]+/row_ages\.json"),
    ("transaction", r"tables/[^/]+/transactions/[^/]+"),
    ("rows by key: sst", r"tables/[^/]+/bucket-\d+/kv/[^/]+\.sst"),
    ("rows by key: manifest", r"tables/[^/]+/bucket-\d+/kv/(MANIFEST-\d+|CURRENT)"),
    ("rows by key: other", r"tables/[^/]+/bucket-\d+/kv/.+"),
    ("segment", r"tables/[^/]+/bucket-\d+/\d+\.log"),
    ("segment index", r"tables/[^/]+/bucket-\d+/\d+\.index"),
    ("writer state", r"tables/[^/]+/bucket-\d+/\d+\.writers"),
    ("durable mark", r"tables/[^/]+/bucket-\d+/durable\.mark"),
    ("table state", r"tables/[^/]+/[^/]+"),
    ("lake catalog", r"lake/catalog\.db.*"),
    ("lake data", r"lake/warehouse/.+\.parquet"),
    ("lake vectors", r"lake/warehouse/.+\.puffin"),
    ("lake metadata", r"lake/warehouse/.+\.(json|avro|metadata\.json)"),
)


@dataclass(frozen=True)
class Damage:
    """What was done to which kind of file."""

    kind: str
    how: str
    where: str

    @property
    def is_old_table(self) -> bool:
        """Whether a whole table was put back to an older state."""
        return self.kind == "folder tables/N" and self.how == "old version"

    def __str__(self) -> str:
        return f"{self.how} of {self.kind} ({self.where})"


def kind_of(relative: str) -> str:
    """Return what a file of a data directory is."""
    for kind, pattern in _KINDS:
        if re.fullmatch(pattern, relative):
            return kind
    raise AssertionError(f"{relative} is no known kind of file: name it in tests/attack")


def damage_directory(world: World, chance: random.Random, *, kinds: set[str] | None) -> Damage:
    """Do one damage to a file or folder; every kind of file is as likely, `kinds` limits them."""
    by_kind: dict[str, list[Path]] = {}
    for path in sorted(world.data.rglob("*")):
        if path.is_file():
            kind = kind_of(str(path.relative_to(world.data)))
            if kind != "lock" and (kinds is None or kind in kinds):
                by_kind.setdefault(kind, []).append(path)
    if kinds is None and chance.random() < 0.15:
        return _damage_folder(world, chance)
    kind = chance.choice(sorted(by_kind))
    while True:
        path = chance.choice(by_kind[kind])
        how = chance.choice(sorted(_FILE_DAMAGES))
        touched = _FILE_DAMAGES[how](path, chance, world, by_kind)
        if touched:
            return Damage(kind, how, " ".join(str(p.relative_to(world.data)) for p in touched))


# Each returns the files it has changed: none when it does not fit the file, or changes nothing.


def _flip(path: Path, chance: random.Random, *_: object) -> list[Path]:
    content = bytearray(path.read_bytes())
    if not content:
        return []
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return [path]


def _truncate(path: Path, chance: random.Random, *_: object) -> list[Path]:
    size = path.stat().st_size
    if not size:
        return []
    end = chance.choice((0, size - 1, chance.randrange(size)))
    path.write_bytes(path.read_bytes()[:end])
    return [path]


def _extend(path: Path, chance: random.Random, *_: object) -> list[Path]:
    more = chance.choice((bytes(64), chance.randbytes(64), b"\n"))
    path.write_bytes(path.read_bytes() + more)
    return [path]


def _zero_page(path: Path, chance: random.Random, *_: object) -> list[Path]:
    content = bytearray(path.read_bytes())
    start = chance.randrange(max(1, len(content) // 4_096 + 1)) * 4_096
    page = content[start : start + 4_096]
    if not any(page):
        return []
    content[start : start + 4_096] = bytes(len(page))
    path.write_bytes(content)
    return [path]


def _remove(path: Path, *_: object) -> list[Path]:
    path.unlink()
    return [path]


def _swap(
    path: Path, chance: random.Random, world: World, by_kind: Mapping[str, list[Path]]
) -> list[Path]:
    """Exchange it with another file of its kind."""
    kind = kind_of(str(path.relative_to(world.data)))
    others = [p for p in by_kind[kind] if p != path and p.read_bytes() != path.read_bytes()]
    if not others:
        return []
    other = chance.choice(others)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)
    return [path, other]


def _make_older(path: Path, chance: random.Random, world: World, *_: object) -> list[Path]:
    """Put the file back as it was in an older copy of the directory."""
    older = world.older / path.relative_to(world.data)
    if not older.exists() or older.read_bytes() == path.read_bytes():
        return []
    shutil.copyfile(older, path)
    return [path]


def _rename(path: Path, chance: random.Random, *_: object) -> list[Path]:
    """Flip a bit of the name."""
    name = bytearray(path.name.encode())
    at = chance.randrange(len(name))
    name[at] ^= 1 << chance.randrange(3)
    other = path.with_name(name.decode("ascii", "replace").replace("/", "_"))
    if other == path or other.exists():
        return []
    path.rename(other)
    return [path]


_FILE_DAMAGES: Final[Mapping[str, Callable[..., list[Path]]]] = {
    "bit flip": _flip,
    "truncation": _truncate,
    "extension": _extend,
    "zeroed page": _zero_page,
    "removal": _remove,
    "swap": _swap,
    "old version": _make_older,
    "renaming": _rename,
}


def _tables_with_rows_in_the_lake(world: World) -> list[Path]:
    return [
        world.data / "tables" / str(number)
        for number, table in enumerate(world.tables.values(), 1)
        if table.has_lake and table.rows
    ]


def _damage_folder(world: World, chance: random.Random) -> Damage:
    folders = [
        path
        for pattern in ("tables/*", "tables/*/bucket-*", "tables/*/transactions", "tables/*/*/kv")
        for path in sorted(world.data.glob(pattern))
        if path.is_dir()
    ]
    path = chance.choice(folders)
    where = str(path.relative_to(world.data))
    how = chance.choice(("removal", "renaming", "dropped name", "doubling", "old version"))
    if how == "old version":
        # Only the lake knows what a table was that is old as a whole.
        path = chance.choice(_tables_with_rows_in_the_lake(world))
        where = str(path.relative_to(world.data))
        shutil.rmtree(path)
        shutil.copytree(world.older / where, path)
    elif how == "removal":
        shutil.rmtree(path)
    elif how == "doubling":
        shutil.copytree(path, path.with_name(f"{path.name}0"))
    elif how == "dropped name":
        path.rename(path.with_name(f"{path.name}.dropped"))
    elif not _rename(path, chance):
        return _damage_folder(world, chance)
    return Damage(f"folder {re.sub(r'[0-9]+', 'N', where)}", how, where)
