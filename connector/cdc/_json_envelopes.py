"""Debezium's JSON as columns of Arrow, on Spark's executors (`mapInArrow`)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.records.unavailable_value import UnavailableValue
from streamhouse.core.rows.checked_rows import Misfit
from streamhouse.core.text.debezium_rows import (
    DELETE,
    OPERATIONS,
    ROW_PARTS,
    SOURCE,
    EnvelopeReader,
)

__all__ = ["JsonEnvelopes"]

# Within the limit of texts that the reader reads one by one.
_ROWS_MAX: Final = 32_768
_SHOWN: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonEnvelopes:
    """Reads batches of two columns: the envelopes, without nulls, and the records' keys.

    The result has a row for each record: `op`, `before`, `after`, `source`, `k`, the row of the
    key, `misfit`, why the record is malformed, and `shown`, the text of a record without an
    envelope. `k` is null where no change needs the key: with `has_keys` an update needs no key.
    """

    schema: pa.Schema
    unit: str
    unavailable: UnavailableValue
    has_keys: bool

    def read(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the parts of all records, in order."""
        types = dict(zip(self.schema.names, self.schema.types, strict=True))
        values, keys = (
            EnvelopeReader(
                types,
                parts=parts,
                check=lambda _rows, _bytes: None,
                what="debezium",
                unit=self.unit,
                any_case=True,
                unavailable=self.unavailable,
            )
            for parts in ((*ROW_PARTS, "source"), ())
        )
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS_MAX):
                yield self._parts(batch.slice(start, _ROWS_MAX), values, keys)

    def _parts(
        self, batch: pa.RecordBatch, value_reader: EnvelopeReader, key_reader: EnvelopeReader
    ) -> pa.RecordBatch:
        values, keys = (column.cast(pa.binary()) for column in batch.columns)
        read = value_reader.rows(values)
        rows, op = read.rows, read.rows.column("op").fill_null("?")
        texts = {at: self._text(misfit, values[at]) for at, misfit in read.misfits.items()}
        needs_key = pc.and_(pc.equal(op, DELETE), pc.invert(rows.column("has_before")))
        reads_key = needs_key
        if not self.has_keys:
            is_update = pc.and_(pc.equal(op, "u"), rows.column("has_before"))
            reads_key = pc.or_(needs_key, is_update)
        read_key = key_reader.rows(pc.if_else(reads_key, keys, b"{}").fill_null(b"{}"))
        has_any = functools.reduce(pc.or_, (array.is_valid() for array in read_key.rows.columns))
        for at, misfit in read_key.misfits.items():
            if needs_key[at].as_py():
                texts.setdefault(at, self._text(misfit, keys[at]))
        is_other = pc.invert(pc.is_in(op, value_set=pa.array(OPERATIONS)))
        others = pc.indices_nonzero(is_other).to_pylist()
        return pa.RecordBatch.from_pydict(
            {
                "op": op,
                **{part: self._part(rows, part) for part in ROW_PARTS},
                "source": pa.StructArray.from_arrays(
                    [rows.column(f"source.{name}") for name in SOURCE], names=list(SOURCE)
                ),
                "k": self._struct(read_key.rows.columns, has_any),
                "misfit": _spread(texts, len(batch)),
                "shown": _spread({at: _shown(values[at]) for at in others}, len(batch)),
            }
        )

    def _text(self, misfit: Misfit, record: pa.Scalar) -> str:
        if misfit.column is None:
            return f"debezium: {misfit.reason}"
        if misfit.reason == self.unavailable.reason:
            return f"debezium: column {misfit.column}: {misfit.reason}"
        return (
            f"debezium: a value does not fit its column {misfit.column}, in {_shown(record)}:"
            f" {misfit.reason}"
        )

    def _part(self, rows: pa.RecordBatch, part: str) -> pa.StructArray:
        columns = [rows.column(f"{part}.{name}") for name in self.schema.names]
        return self._struct(columns, rows.column(f"has_{part}"))

    def _struct(self, columns: Sequence[pa.Array], is_valid: pa.Array) -> pa.StructArray:
        return pa.StructArray.from_arrays(
            columns, fields=list(self.schema), mask=pc.invert(is_valid)
        )


def _spread(texts: Mapping[int, str], count: int) -> pa.StringArray:
    return pa.array(map(texts.get, range(count)) if texts else [None] * count, pa.string())


def _shown(record: pa.Scalar) -> str:
    text: str = record.as_py()[: 4 * _SHOWN].decode(errors="replace")
    return text[:_SHOWN]
