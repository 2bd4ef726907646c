"""Rows and keys as bytes: what goes in comes out, identical rows are identical bytes, and the
code for one row agrees with the code for many."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.model.bucketing import encode_key
from streamhouse.core.model.hashing.key_hash import KeyHasher
from streamhouse.storage_service.kv.cache._write_behind import nearly_sorted
from streamhouse.storage_service.kv.rows.row_codec import RowCodec, stamp_versions, versions_of
from streamhouse.storage_service.kv.rows.single_row import SingleRows
from streamhouse.storage_service.kv.table_rules import TableRules
from tests.support.kv_model import identity
from tests.support.kv_world import FLAT_TYPES, table_rules, values


@st.composite
def tables_with_rows(draw: st.DrawFn, **kinds: Any) -> tuple[TableRules, pa.RecordBatch]:
    rules = draw(table_rules(**kinds))
    arrow = rules.schema.to_arrow()
    row = st.tuples(
        *(values(f.type) if not f.nullable else st.none() | values(f.type) for f in arrow)
    )
    rows = draw(st.lists(row, max_size=8))
    columns = [pa.array([r[i] for r in rows], f.type) for i, f in enumerate(arrow)]
    return rules, pa.RecordBatch.from_arrays(columns, schema=arrow)


@given(tables_with_rows(), st.integers(0, 3), st.data())
def test_rows_come_back_and_bytes_are_canonical(
    made: tuple[TableRules, pa.RecordBatch], skipped: int, data: st.DataObject
) -> None:
    rules, rows = made
    rows = rows.slice(skipped)
    codec = RowCodec(rules.schema, schema_id=data.draw(st.integers(0, 255)), table="db.t")

    encoded = codec.encode(rows)
    decoded = codec.decode(encoded)

    decoded.validate(full=True)
    plain, back = rows.to_pylist(), decoded.to_pylist()
    assert identity(back) == identity(plain)
    assert codec.encode(decoded).equals(encoded)
    as_bytes = encoded.to_pylist()
    for i, row in enumerate(plain):
        for j, other in enumerate(plain):
            assert (as_bytes[i] == as_bytes[j]) == (identity(row) == identity(other))
    assert identity(codec.decode(encoded.slice(1)).to_pylist()) == identity(plain[1:])


@given(tables_with_rows(), st.data())
def test_a_stamp_changes_the_version_only(
    made: tuple[TableRules, pa.RecordBatch], data: st.DataObject
) -> None:
    rules, rows = made
    codec = RowCodec(rules.schema, schema_id=0, table="db.t")
    stamps = pa.array(
        data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=len(rows), max_size=len(rows))),
        pa.int64(),
    )
    encoded = codec.encode(rows)

    stamp_versions(encoded, stamps.to_numpy())

    assert versions_of(encoded).tolist() == stamps.to_pylist()
    assert identity(codec.decode(encoded).to_pylist()) == identity(rows.to_pylist())


@given(tables_with_rows(types=FLAT_TYPES) | tables_with_rows())
def test_one_row_alone_is_decoded_as_among_many(made: tuple[TableRules, pa.RecordBatch]) -> None:
    rules, rows = made
    codec = RowCodec(rules.schema, schema_id=0, table="db.t")
    single = SingleRows(rules, codec)

    encoded = codec.encode(rows).to_pylist()

    assert [
        identity(dict(zip(rules.schema.names, single.decode_values(v), strict=True)))
        for v in encoded
    ] == [identity(row) for row in rows.to_pylist()]


@given(tables_with_rows())
def test_one_key_alone_is_encoded_and_hashed_as_among_many(
    made: tuple[TableRules, pa.RecordBatch],
) -> None:
    rules, rows = made
    single = SingleRows(rules, RowCodec(rules.schema, schema_id=0, table="db.t"))
    columns = [rows.column(name) for name in rules.primary_key]
    keys = encode_key(columns)
    hasher = KeyHasher()

    alone = [
        single.encode_key({name: row[name] for name in rules.primary_key})
        for row in rows.to_pylist()
    ]

    assert alone == keys.to_pylist()
    first, second = hasher.many(keys)
    assert [hasher.one(key) for key in alone] == list(
        zip(first.tolist(), second.tolist(), strict=True)
    )


@given(st.lists(st.binary(max_size=20).map(lambda b: b"\x01" + b), unique=True, max_size=200))
def test_hashes_depend_on_every_byte(keys: list[bytes]) -> None:
    first, second = KeyHasher().many(pa.array(keys, pa.binary()))

    assert len(set(zip(first.tolist(), second.tolist(), strict=True))) == len(keys)
    assert len(set(first.tolist())) == len(set(second.tolist())) == len(keys)


def test_short_and_similar_keys_have_different_hashes() -> None:
    tails = [bytes(t) for n in range(5) for t in itertools.product(range(4), repeat=n)]
    tails += [bytes(n) for n in range(5, 40)] + [bytes(n) + b"\x01" for n in range(5, 40)]
    first, second = KeyHasher().many(pa.array([b"\x01" + tail for tail in tails]))

    assert len(set(first.tolist())) == len(set(second.tolist())) == len(tails)


@given(
    st.lists(
        st.sampled_from([b"\x01a", b"\x01ab", b"\x01abcdefghi", b"\x01abcdefghj", b"\x01\xff"])
        | st.binary(max_size=12).map(lambda b: b"\x01" + b),
        max_size=40,
    )
)
def test_near_order_is_order_by_what_it_sees_and_keeps_equal_keys_in_place(
    keys: list[bytes],
) -> None:
    in_order, positions = nearly_sorted(pa.array(keys, pa.binary()))
    order = positions.tolist()

    assert in_order.to_pylist() == [keys[i] for i in order]
    assert sorted(order) == list(range(len(keys)))
    for key in set(keys):
        places = [i for i in order if keys[i] == key]
        assert places == sorted(places)
    short = [key for key in keys if len(key) <= 6]
    if short == keys:
        padded = [keys[i].ljust(6, b"\x00") for i in order]
        assert padded == sorted(padded)
