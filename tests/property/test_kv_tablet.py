"""A bucket under random writes, crashes, flushes and evictions equals a dict.

A run is a seed: `check(seed)` repeats it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.storage_service.kv.kv_tablet import KvOptions
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite
from tests.support.examples import examples
from tests.support.kv_model import KvModel, identity
from tests.support.kv_world import (
    Batch,
    LoggedBucket,
    fold_log,
    found_alone,
    random_batch,
    random_keys,
    random_rules,
)

# Everything kept; next to nothing kept, so that rows are read from RocksDB; and hand-overs often.
OPTIONS = (
    KvOptions(),
    KvOptions(cache_bytes=1 << 10, segment_bytes=256, backlog_rows=6),
    KvOptions(cache_bytes=64 << 10, segment_bytes=512, backlog_rows=3),
)
STEPS = 25


class Run:
    """One bucket beside its model. Planned writes wait in between, as they do for the log."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = Random(seed)
        self.folder = folder
        image = self.random.choice(["full", "after"])
        self.rules = random_rules(self.random, {"table.changelog.image": image})
        self.keys = random_keys(self.random, self.rules, 12)
        self.bucket = LoggedBucket(
            folder / "state", self.rules, options=self.random.choice(OPTIONS)
        )
        self.model = KvModel(
            self.rules.schema,
            self.rules.primary_key,
            self.rules.merge,
            renews_unchanged=self.rules.renews_unchanged,
        )
        self.pending: list[tuple[Batch, PlannedWrite]] = []
        self.run_begun: Any = None

    def step(self) -> None:
        steps: list[Callable[[], None]] = [
            *[self.write] * 4,
            *[self.plan] * 3,
            *[self.finish] * 2,
            self.abort,
            self.crash,
            self.flush,
            self.load,
            self.run,
            self.copy,
        ]
        self.random.choice(steps)()
        if not self.pending:
            self.check(self.bucket)
        state = fold_log(self.bucket.entries, self.rules.primary_key)
        assert identity(state) == identity(self.model.rows)

    def write(self) -> None:
        self.plan()
        self.finish()

    def plan(self) -> None:
        """Plan on top of what is planned already; the log has it only later."""
        batch = random_batch(self.random, self.rules, self.keys, rows_max=10)
        self.pending.append((batch, self.bucket.plan(batch)))

    def finish(self) -> None:
        """The log has all that is planned."""
        for batch, planned in self.pending:
            self.model.apply(batch.changes, batch.columns)
            self.bucket.append(planned)
            self.bucket.tablet.apply(planned)
            if self.random.random() < 0.5:
                self.run()
            elif self.bucket.tablet.needs_upkeep:
                self.bucket.tablet.keep_up()
        self.pending.clear()

    def abort(self) -> None:
        """The log refuses one of the planned writes; it and those after it are taken back."""
        if self.pending:
            first = self.random.randrange(len(self.pending))
            self.bucket.tablet.abort(self.pending[first][1])
            del self.pending[first:]

    def crash(self) -> None:
        """Some of what is planned is durable in the log, none of it applied."""
        for batch, planned in self.pending[: self.random.randint(0, len(self.pending))]:
            self.model.apply(batch.changes, batch.columns)
            self.bucket.append(planned)
        self.pending.clear()
        self.bucket.reopen()

    def run(self) -> None:
        """Begin to hand over what is due, or do the next step of what was begun."""
        tablet = self.bucket.tablet
        if self.run_begun is None:
            self.run_begun = tablet.begin_run()
        elif self.random.random() < 0.5:
            tablet.write_run(self.run_begun)
        else:
            tablet.end_run(self.run_begun)
            self.run_begun = None

    def flush(self) -> None:
        self.bucket.tablet.flush()
        assert self.bucket.tablet.flushed_offset == self.bucket.tablet.applied_offset

    def load(self) -> None:
        self.bucket.tablet.load_some(self.random.randint(1, 20))

    def copy(self) -> None:
        """A checkpoint opens as the bucket is, and needs nothing of the log so far."""
        self.finish()
        target = self.folder / "copy"
        self.bucket.tablet.checkpoint(target)
        copy = LoggedBucket(target, self.rules)
        try:
            self.check(copy)
        finally:
            copy.tablet.close()
            shutil.rmtree(target)

    def check(self, bucket: LoggedBucket) -> None:
        model, tablet = self.model, bucket.tablet
        assert tablet.row_count == len(model.rows)
        assert tablet.applied_offset == tablet.planned_offset == len(model.log)
        assert tablet.flushed_offset <= tablet.applied_offset
        expected = {key: model.rows[key][1] for key in self.keys if key in model.rows}
        assert identity(bucket.lookup_all(self.keys)) == identity(expected)
        for key in self.keys:
            alone = found_alone(tablet, dict(zip(self.rules.primary_key, key, strict=True)))
            assert identity(alone) == identity(expected.get(key))
        self.check_prefix(bucket, self.random.choice(self.keys)[:1])

    def check_prefix(self, bucket: LoggedBucket, prefix: tuple[Any, ...]) -> None:
        schema = self.rules.schema.select(self.rules.primary_key[:1], table="").to_arrow()
        row = pa.RecordBatch.from_arrays(
            [pa.array([prefix[0]], schema.field(0).type)], schema=schema
        )
        found = bucket.tablet.prefix_lookup(row, rows_max=100).rows.to_pylist()
        model = self.model
        expected = {key: row for key, (_, row) in model.rows.items() if key[:1] == prefix}
        assert len(found) == len(expected)
        by_key = {model.key(row): row for row in found}
        assert all(identity(by_key[key]) == identity(row) for key, row in expected.items())


def check(seed: int) -> None:
    with TemporaryDirectory(prefix="kv-") as folder:
        run = Run(seed, Path(folder))
        try:
            for _ in range(STEPS):
                run.step()
        finally:
            run.bucket.tablet.close()


@settings(max_examples=examples(16))
@given(st.integers(0, 2**32))
def test_a_bucket_is_a_dict_that_survives(seed: int) -> None:
    check(seed)
