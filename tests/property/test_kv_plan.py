"""A planned write is what changing a dict row by row gives: changelog, offsets, state and count."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.model.bucketing import encode_key
from streamhouse.core.model.hashing.key_hash import HashedKeys
from streamhouse.core.model.merge_engine import MergeRules
from streamhouse.core.model.schema import (
    Schema,
)
from streamhouse.storage_service.kv.plan.upsert_plan import BucketRows, PlannedWrite, plan_rows
from streamhouse.storage_service.kv.plan.write_input import check_rows
from streamhouse.storage_service.kv.rows.row_codec import RowCodec, versions_of
from streamhouse.storage_service.kv.table_rules import TableRules
from tests.support.kv_model import Entry, KvModel, identity
from tests.support.kv_world import (
    FLAT_TYPES,
    Batch,
    batch_of,
    batches,
    entries_of,
    operations_of_changes,
    table_rules,
)


class DictStore:
    """Values by key: the state a plan is made against."""

    def __init__(self, rules: TableRules) -> None:
        self.rules = rules
        self.codec = RowCodec(rules.schema, schema_id=0, table=rules.table)
        self.values: dict[bytes, bytes] = {}
        self.end_offset = 0
        self.row_count = 0

    def fetch(self, keys: pa.Array) -> pa.Array:
        return pa.array([self.values.get(key) for key in keys.to_pylist()], pa.binary())

    def _newest(self, hashed: HashedKeys) -> pa.Array:
        return self.fetch(hashed.keys)

    def write(self, batch: Batch) -> PlannedWrite:
        checked = check_rows(
            batch_of(self.rules, batch),
            self.rules,
            operations=operations_of_changes(batch),
            columns=batch.columns,
        )
        here = BucketRows(len(checked.row_numbers), self.end_offset, self._newest)
        (planned,), _ = plan_rows(checked, [here], rules=self.rules, codec=self.codec)
        for key, value in zip(planned.keys.to_pylist(), planned.values.to_pylist(), strict=True):
            if value is None:
                del self.values[key]
            else:
                self.values[key] = value
        self.end_offset = planned.end_offset
        self.row_count += planned.row_count_delta
        return planned


def comparable(entries: list[Entry]) -> list[Any]:
    return [(e.offset, e.change_type, e.retracts, identity(e.row)) for e in entries]


def check_equal_to_model(rules: TableRules, made: list[Batch]) -> None:
    store = DictStore(rules)
    model = KvModel(
        rules.schema, rules.primary_key, rules.merge, renews_unchanged=rules.renews_unchanged
    )
    for batch in made:
        expected = model.apply(batch.changes, batch.columns)

        planned = store.write(batch)

        planned.changelog.validate(full=True)
        assert comparable(entries_of(planned.changelog, planned.base_offset)) == comparable(
            expected
        )
        assert store.row_count == len(model.rows) == len(store.values)
        for version, row in model.rows.values():
            key = encode_key([pa.array([row[k]], _type(rules, k)) for k in rules.primary_key])
            value = store.fetch(key)
            assert versions_of(value).tolist() == [version]
            assert identity(store.codec.decode(value).to_pylist()) == identity([row])


def _type(rules: TableRules, name: str) -> pa.DataType:
    return rules.schema.column(name, table="").type


IMAGES = st.sampled_from(["full", "after"]).map(lambda image: {"table.changelog.image": image})


@given(st.data())
def test_last_row_wins(data: st.DataObject) -> None:
    rules = data.draw(table_rules(merge=IMAGES))

    check_equal_to_model(rules, data.draw(batches(rules)))


@given(st.data())
def test_partial_updates_keep_what_they_do_not_name(data: st.DataObject) -> None:
    rules = data.draw(table_rules(merge=IMAGES))

    check_equal_to_model(rules, data.draw(batches(rules, partial=True)))


@given(st.data())
def test_first_row_stays(data: st.DataObject) -> None:
    engine = IMAGES.map(lambda image: image | {"table.merge-engine": "first_row"})
    rules = data.draw(table_rules(merge=engine))

    check_equal_to_model(rules, data.draw(batches(rules)))


@given(st.data())
def test_greatest_version_wins(data: st.DataObject) -> None:
    engine = IMAGES.map(
        lambda image: (
            image
            | {
                "table.merge-engine": "versioned",
                "table.merge-engine.versioned.ver-column": "version",
            }
        )
    )
    version = data.draw(st.sampled_from([pa.int16(), pa.int64(), pa.timestamp("us"), pa.date32()]))
    plain = data.draw(table_rules())
    fields = [*plain.schema.to_arrow(), pa.field("version", version, nullable=False)]
    rules = _with(plain, pa.schema(fields), data.draw(engine))

    check_equal_to_model(rules, data.draw(batches(rules)))


@given(st.data())
def test_aggregates(data: st.DataObject) -> None:
    plain = data.draw(table_rules(types=FLAT_TYPES))
    properties = data.draw(IMAGES) | {
        "table.merge-engine": "aggregation",
        "table.delete.behavior": data.draw(st.sampled_from(["allow", "ignore"])),
    }
    for column in plain.schema.columns:
        if column.name in plain.primary_key:
            continue
        functions = ["last_value", "last_non_null", "first_value", "min", "max"]
        if pa.types.is_boolean(column.type):
            functions += ["bool_and", "bool_or"]
        if pa.types.is_floating(column.type):
            functions += ["sum"] * 3
        if pa.types.is_string(column.type):
            functions += ["listagg"] * 3
        if pa.types.is_integer(column.type) and column.type.bit_width >= 32:
            functions += ["count"] * 3
        properties[f"fields.{column.name}.agg"] = data.draw(st.sampled_from(functions))
    rules = _with(plain, plain.schema.to_arrow(), properties)

    check_equal_to_model(rules, data.draw(batches(rules, partial=True)))


@given(st.data())
def test_sums_of_integers_and_decimals(data: st.DataObject) -> None:
    types = [pa.int8(), pa.int32(), pa.int64(), pa.decimal128(10, 2), pa.decimal128(38, 4)]
    t = data.draw(st.sampled_from(types))
    schema = pa.schema([pa.field("k0", pa.string(), nullable=False), pa.field("v0", t)])
    plain = data.draw(table_rules())
    rules = _with(
        plain,
        schema,
        {
            "table.merge-engine": "aggregation",
            "fields.v0.agg": "sum",
            "table.delete.behavior": "allow",
        },
        primary_key=("k0",),
    )
    numbers = st.none() | st.integers(-1, 1).map(
        lambda n: n if pa.types.is_integer(t) else Decimal(n)
    )
    changes = st.tuples(
        st.sampled_from(["upsert", "upsert", "upsert", "delete"]),
        st.fixed_dictionaries({"k0": st.sampled_from("abc"), "v0": numbers}),
    )

    check_equal_to_model(
        rules, [Batch(c) for c in data.draw(st.lists(st.lists(changes, max_size=40), max_size=3))]
    )


def _with(
    plain: TableRules,
    schema: pa.Schema,
    properties: dict[str, str],
    *,
    primary_key: tuple[str, ...] | None = None,
) -> TableRules:
    own = Schema.from_arrow(schema)
    key = primary_key or plain.primary_key
    merge = MergeRules.parse(properties, schema=own, primary_key=key, table=plain.table)
    return TableRules(table=plain.table, schema=own, primary_key=key, merge=merge)
