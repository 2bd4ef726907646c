"""A decimal is stored as it was written or refused, at every door; Python's decimals are the model.

Arrow alone ends the process for some of these numbers, and stores others as zero.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamhouse.cdc_source._source_types import to_array
from streamhouse.client.values._python_rows import rows_as_arrow
from streamhouse.core.errors import InvalidPredicateError, SchemaMismatchError
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.core.model.values.decimals import as_decimal
from streamhouse.core.rows._row_text import column_of
from streamhouse.core.rows.row_splitter import RowSplitter, cast_values
from streamhouse.reading.where._evaluation import filter_batch
from streamhouse.reading.where.parser import parse_predicate
from tests.support.examples import examples
from tests.support.in_process_service import in_process_service
from tests.support.kafka_records import columns_of, read_alone_and_among_many, record_table

PRICE: Final = pa.decimal128(10, 2)
FAR: Final = ("1e-100000000", "1e-77", "1e-41", "-7e-61", "1e100000000", "1e39")
ZERO: Final = ("0e-100000000", "0e100000000", "-0.00e-77")
SCHEMA: Final = pa.schema([pa.field("id", pa.int64(), nullable=False), ("price", PRICE)])

digits = st.text("0123456789", min_size=1, max_size=45)
exponents = st.one_of(
    st.integers(-45, 45), st.sampled_from([-100_000_000, -2_147_483_649, -77, 77, 2**31])
)
types = st.integers(1, 38).flatmap(lambda p: st.tuples(st.just(p), st.integers(0, p)))


def _exact(text: str, precision: int, scale: int) -> Decimal | None:
    """Return the value of decimal(precision, scale) that a text writes; None: it writes none."""
    sign, written, exponent = Decimal(text).as_tuple()
    number = "".join(map(str, written)).lstrip("0")
    assert isinstance(exponent, int)
    while number.endswith("0") and exponent < -scale:
        number, exponent = number[:-1], exponent + 1
    if not number:
        return Decimal(0)
    if exponent < -scale or len(number) + exponent > precision - scale:
        return None
    return Decimal((sign, tuple(map(int, number)), exponent))


@settings(max_examples=examples(500), deadline=None)
@given(st.booleans(), digits, st.none() | digits, st.none() | exponents, types)
@example(False, "1", None, -77, (10, 2))
@example(False, "1", "0" * 40, None, (10, 2))
def test_a_number_is_the_value_that_it_writes_or_none(
    is_negative: bool,
    whole: str,
    part: str | None,
    exponent: int | None,
    shape: tuple[int, int],
) -> None:
    text = ("-" if is_negative else "") + (whole.lstrip("0") or "0")
    text += ("" if part is None else f".{part}") + ("" if exponent is None else f"e{exponent}")
    t = pa.decimal128(*shape)
    expected = _exact(text, *shape)

    info = record_table(pa.schema([("d", t)]), value_format="json")
    for form in (text, json.dumps(text)):
        found = read_alone_and_among_many(columns_of([f'{{"d":{form}}}'.encode()]), info)
        assert found.rows.column("d").to_pylist() == ([] if expected is None else [expected])
    array, wrong = column_of([Decimal(text), text], t)
    assert array.to_pylist() == [expected, expected]
    assert list(wrong) == ([0, 1] if expected is None else [])
    try:
        assert cast_values(pa.array([None, text]), t).to_pylist() == [None, expected]
    except (pa.ArrowInvalid, SchemaMismatchError):
        assert expected is None


def _json(values: list[str], form: str, **properties: str) -> list[Any]:
    info = record_table(SCHEMA, ("id",), **properties)
    records = columns_of([(form % value).encode() for value in values])
    return [str(value) for value in read_alone_and_among_many(records, info).rows.column("price")]


DOORS: Final[dict[str, Callable[[list[str]], list[str]]]] = {
    "json": lambda values: _json(values, '{"id":1,"price":%s}', value_format="json"),
    "json text": lambda values: _json(values, '{"id":1,"price":"%s"}', value_format="json"),
    "debezium": lambda values: _json(
        values, '{"op":"c","after":{"id":1,"price":%s}}', value_format="debezium-json"
    ),
    "debezium text": lambda values: _json(
        values,
        '{"payload":{"op":"c","after":{"id":1,"price":"%s"}}}',
        value_format="debezium-json",
    ),
    "escaped": lambda values: _json(
        [value.replace("e", "\\u0065") for value in values],
        '{"id":1,"price":"%s"}',
        value_format="json",
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_far_exponents_are_refused_in_records_and_zeros_are_zero(door: str) -> None:
    assert DOORS[door]([*FAR, *ZERO]) == ["0.00"] * len(ZERO)


def test_far_exponents_in_lists_and_alone_as_keys() -> None:
    lists = record_table(pa.schema([("l", pa.list_(PRICE))]), value_format="json")
    keyed = record_table(
        pa.schema([pa.field("k", PRICE, nullable=False), ("v", pa.string())]),
        ("k",),
        value_format="json",
    )
    values = [f'{{"l":[{far}]}}'.encode() for far in FAR]

    assert len(read_alone_and_among_many(columns_of(values), lists).misfits) == len(FAR)
    records = columns_of([b'{"v":"a"}'] * len(FAR), [far.encode() for far in FAR])
    assert len(read_alone_and_among_many(records, keyed).misfits) == len(FAR)


async def test_far_exponents_are_refused_over_http(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        for path, key in (("t", ()), ("k", ("price",))):
            schema = SCHEMA.set(1, pa.field("price", PRICE, nullable=not key))
            descriptor = TableDescriptor(
                path=TablePath.parse(path), schema=Schema.from_arrow(schema), primary_key=key
            )
            body = descriptor.to_json()
            assert (await service.call("POST", "/v1/tables", json_body=body)).status == 201
        for far in FAR:
            for kind, body_of in {
                "application/x-ndjson": b'{"id":1,"price":%s}\n' * 20,
                "text/csv": b"id,price\n1,%s\n",
                "application/json": b'[{"id":1,"price":%s}]',
            }.items():
                sent = body_of.replace(b"%s", far.encode())
                headers = {"content-type": kind}
                answer = await service.call(
                    "POST", "/v1/tables/t/append", headers=headers, body=sent
                )
                assert answer.status == 400, (kind, far, answer.body)
                assert b"price" in answer.body
            answer = await service.call("GET", f"/v1/tables/k/rows/{far}")
            assert answer.status == 400, (far, answer.body)
            keys = f'[{{"price":{far}}}]'.encode()
            answer = await service.call(
                "POST",
                "/v1/tables/k/lookup",
                headers={"content-type": "application/json"},
                body=keys,
            )
            assert answer.status == 400, (far, answer.body)


@pytest.mark.parametrize("far", FAR)
def test_far_exponents_are_refused_in_python_and_from_sources(far: str) -> None:
    schema = Schema.from_arrow(SCHEMA)
    descriptor = TableDescriptor(path=TablePath.parse("t"), schema=schema)
    info = TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)

    with pytest.raises(SchemaMismatchError, match="price"):
        rows_as_arrow(info, [{"id": 1, "price": Decimal(far)}])
    with pytest.raises(SchemaMismatchError, match="price"):
        to_array([far], PRICE, None, where="price")
    checked = RowSplitter(info).split(
        pa.record_batch({"id": [1, 2], "price": [far, "1.5"]}).cast(
            pa.schema([("id", pa.int64()), ("price", pa.string())])
        )
    )
    assert [misfit.column for misfit in checked.misfits.values()] == ["price"]


@pytest.mark.parametrize("literal", ["-7e-61", "1e39", "'1e-77'", "'1e100000000'", "'-1e-41'"])
def test_no_row_is_where_a_far_number_is(literal: str) -> None:
    rows = pa.RecordBatch.from_pylist([{"id": 1, "price": Decimal(0)}], schema=SCHEMA)

    predicate = parse_predicate(f"price = {literal}", Schema.from_arrow(SCHEMA), table="t")

    assert filter_batch(predicate, rows).num_rows == 0


@pytest.mark.parametrize("literal", ["1e100000000", "CAST('1e-77' AS DECIMAL(10,2))"])
def test_where_refuses_what_is_no_number_of_spark(literal: str) -> None:
    with pytest.raises(InvalidPredicateError):
        parse_predicate(f"price = {literal}", Schema.from_arrow(SCHEMA), table="t")


def test_a_decimal_has_the_scale_of_its_type() -> None:
    assert str(as_decimal(5, PRICE)) == "5.00"
    assert str(as_decimal(Decimal("1.5000"), PRICE)) == "1.50"
    assert str(as_decimal(Decimal("12e3"), PRICE)) == "12000.00"
