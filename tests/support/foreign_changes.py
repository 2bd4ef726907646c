"""Statements by which another engine changes rows of a log table in the lake, and their result."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

__all__ = ["REFUSED_OF_KEY_TABLES", "REFUSED_OF_LOG_TABLES", "SCHEMA", "ForeignModel", "first_name"]

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])

REFUSED_OF_LOG_TABLES = {
    "INSERT INTO {t} SELECT * FROM {t} LIMIT 1": "adds 1 more rows than it removes",
    "MERGE INTO {t} AS t USING (SELECT id + 5000 AS id FROM {t} WHERE id % 50 = 1) AS s"
    " ON t.id = s.id WHEN NOT MATCHED THEN INSERT (id, name, __bucket, __offset, __timestamp)"
    " VALUES (s.id, 'x', 0, 1, now())": "more rows than it removes",
}
REFUSED_OF_KEY_TABLES = (
    "DELETE FROM {t} WHERE id = 3",
    "UPDATE {t} SET name = 'x' WHERE id = 4",
    "MERGE INTO {t} AS t USING (SELECT id FROM {t} WHERE id < 9) AS s ON t.id = s.id"
    " WHEN MATCHED THEN DELETE",
    "INSERT INTO {t} SELECT * FROM {t} LIMIT 1",
)


def first_name(key: int) -> str:
    """Return the name that a row is appended with: long enough for a few rows a log segment."""
    return f"n{key}-{hashlib.shake_128(str(key).encode()).hexdigest(1000)}"


@dataclass
class ForeignModel:
    """The rows of a log table by id: those in the lake, and those in the log alone."""

    lake: dict[int, str] = field(default_factory=dict)
    log: dict[int, str] = field(default_factory=dict)
    _last_id: int = 0

    def new_rows(self, count: int) -> pa.Table:
        """Return rows to append, which the log has from now on."""
        ids = range(self._last_id, self._last_id + count)
        self._last_id += count
        self.log.update({key: first_name(key) for key in ids})
        return pa.table({"id": ids, "name": [first_name(key) for key in ids]}, schema=SCHEMA)

    def changed_rows(self, ids: Iterable[int]) -> pa.Table:
        """Return other rows with these ids, to upsert, which the log has from now on."""
        names = {key: f"c{key}" for key in ids}
        self.log.update(names)
        return pa.table({"id": [*names], "name": [*names.values()]}, schema=SCHEMA)

    def tiered(self) -> None:
        """A round has moved the rows of the log."""
        self.lake.update(self.log)
        self.log.clear()

    @property
    def rows(self) -> list[tuple[int, str]]:
        """All rows, by id."""
        return sorted({**self.lake, **self.log}.items())

    @property
    def lake_rows(self) -> list[tuple[int, str]]:
        """The rows in the lake, by id."""
        return sorted(self.lake.items())

    def statements(self, seed: int, count: int) -> Iterator[str]:
        """Yield statements with the table as `{t}`, each as the model has got it."""
        chance = random.Random(seed)
        for number in range(count):
            kind = chance.choice(("delete", "update", "merge delete", "merge update"))
            divisor = chance.choice((5, 13, 31))
            rest = chance.randrange(divisor)
            start = chance.randrange(self._last_id)
            end = start + chance.choice((20, 80, self._last_id))
            where = f"id % {divisor} = {rest} AND id >= {start} AND id < {end}"
            keys = [k for k in self.lake if k % divisor == rest and start <= k < end]
            if "update" in kind:
                self.lake.update(dict.fromkeys(keys, f"u{number}"))
            else:
                for key in keys:
                    del self.lake[key]
            yield {
                "delete": f"DELETE FROM {{t}} WHERE {where}",
                "update": f"UPDATE {{t}} SET name = 'u{number}' WHERE {where}",
                "merge delete": _merge(where, "DELETE"),
                "merge update": _merge(where, f"UPDATE SET name = 'u{number}'"),
            }[kind]


def _merge(where: str, then: str) -> str:
    return (
        f"MERGE INTO {{t}} AS t USING (SELECT id FROM {{t}} WHERE {where}) AS s ON t.id = s.id"
        f" WHEN MATCHED THEN {then}"
    )
