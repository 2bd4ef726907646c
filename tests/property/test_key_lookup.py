"""Keys looked up one by one and by arrays: the same rows, wherever they are, in every bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import RequestTooLargeError
from streamhouse.core.model.bucketing import split_by_bucket
from streamhouse.core.model.table import TableDescriptor, TablePath
from streamhouse.storage_service.engine.keys.key_lookup import KeyLookup, Keys, StoredRows
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite, delete_of
from streamhouse.storage_service.kv.table_rules import TableRules
from tests.support.examples import examples
from tests.support.in_process_service import open_manager
from tests.support.kv_model import identity
from tests.support.kv_world import random_batch, random_keys, random_rules

PATH = TablePath.parse("t")
ANY_SIZE = 1 << 40

Key = tuple[Any, ...]
Row = dict[str, Any]


class _World:
    """A random table, what it should have, and keys of which some are there."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.rules: TableRules = random_rules(random, {})
        names = self.rules.primary_key
        self.descriptor = TableDescriptor(
            path=PATH,
            schema=self.rules.schema,
            primary_key=names,
            bucket_key=tuple(random.sample(names, random.randint(1, len(names)))),
            bucket_count=random.choice([1, 2, 5]),
        )
        self.keys = random_keys(random, self.rules, random.choice([1, 4, 40]))
        self.rows: dict[Any, Row] = {}

    def key_rows(self, keys: Sequence[Key]) -> pa.RecordBatch:
        schema = self.rules.schema.select(self.rules.primary_key, table="").to_arrow()
        columns = [pa.array([key[i] for key in keys], f.type) for i, f in enumerate(schema)]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    async def write(self, manager: TabletManager, table: KeyTable) -> None:
        batch = random_batch(self.random, self.rules, self.keys, rows_max=30)
        rows = [] if batch.columns else [row for kind, row in batch.changes if kind == "upsert"]
        gone = self.random.sample(self.keys, len(self.keys) // 4)
        schema = self.rules.schema.to_arrow()
        columns = [pa.array([row[f.name] for row in rows], f.type) for f in schema]
        upserted = pa.RecordBatch.from_arrays(columns, schema=schema)
        for changes, make in ((upserted, KeyWrite), (self.key_rows(gone), delete_of)):
            parts = split_by_bucket(
                changes, self.descriptor.effective_bucket_key, self.descriptor.bucket_count
            )
            writes = [make(bucket, part) for bucket, part in parts.items()]
            if writes:
                await manager.write_keys(table, writes, columns=None, writer_id=0)
        for row in rows:
            self.rows[identity(tuple(row[name] for name in self.rules.primary_key))] = row
        for key in gone:
            self.rows.pop(identity(key), None)

    def check(self, table: KeyTable) -> None:
        """Every way finds the same; what is in memory is found without files, or said not to be."""
        lookup = table.lookup
        asked = self.random.choices(self.keys, k=self.random.choice([1, 3, 20, 300]))
        expected = [self.rows.get(identity(key)) for key in asked]
        given = lookup.keys(self.key_rows(asked))
        few = Keys(pa.array(given.encoded, pa.binary()).to_pylist(), list(given.buckets))
        many = Keys(pa.array(few.encoded, pa.binary()), np.array(few.buckets))
        found = lookup.find(few)
        assert _shown(lookup, found) == _shown(lookup, lookup.find(many)) == identity(expected)
        is_loaded = all(bucket.rows.is_loaded for bucket in table.key_buckets)
        for keys in (few, many):
            in_memory = lookup.find_in_memory(keys, bytes_max=ANY_SIZE)
            assert in_memory is not None or not is_loaded
            assert in_memory is None or _shown(lookup, in_memory) == identity(expected)
            if any(expected):
                assert lookup.find_in_memory(keys, bytes_max=1) is None
        ends = {bucket: table.tablet(bucket).high_watermark for bucket in set(few.buckets)}
        assert found.ends == ends
        for key, encoded, bucket, row in zip(asked, *few, expected, strict=True):
            alone = lookup.key(dict(zip(self.rules.primary_key, key, strict=True)))
            assert alone == ([encoded], [bucket])
            values = lookup.values(lookup.find(alone))
            names = self.rules.schema.names
            one = None if values is None else dict(zip(names, values, strict=True))
            assert identity(one) == identity(row)
        if len(asked) > 16 and any(expected):
            for keys in (few, many):
                with pytest.raises(RequestTooLargeError, match="answers_bytes_max"):
                    lookup.find(keys, bytes_max=1)


def _shown(lookup: KeyLookup, found: StoredRows) -> Any:
    rows = []
    for row in lookup.rows(found).rows.to_pylist():
        is_found = row.pop("__found")
        assert is_found or set(row.values()) == {None}
        rows.append(row if is_found else None)
    return identity(rows)


def _key_table(manager: TabletManager) -> KeyTable:
    table = manager.table(PATH)
    assert isinstance(table, KeyTable)
    return table


async def _scenario(world: _World, directory: Path, config: Mapping[str, Any]) -> None:
    for start in range(3):
        async with open_manager(directory, **config) as manager:
            if start == 0:
                await manager.create_table(world.descriptor)
            table = _key_table(manager)
            # After a start rows are in files, and come into memory bit by bit.
            world.check(table)
            for _ in range(2):
                await world.write(manager, table)
                world.check(table)


@settings(max_examples=examples(12), deadline=None)
@given(st.integers(min_value=0, max_value=2**32), st.sampled_from([1, 20_000, 1 << 26]))
# One row of a column of one byte, for an answer of one byte.
@example(179, 1)
def test_one_by_one_and_by_arrays_the_same_is_found(seed: int, cache_bytes: int) -> None:
    with TemporaryDirectory(prefix="keys-") as directory:
        config = {"key_cache_bytes_max": cache_bytes}
        asyncio.run(_scenario(_World(seed), Path(directory), config))
