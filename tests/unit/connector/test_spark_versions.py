"""One module knows what differs between the versions of PySpark."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas import functions
from pyspark.sql.types import StructType, TimestampNTZType, TimestampType

from streamhouse.connector._spark_versions import (
    OwnStepReader,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    arrow_function,
    from_arrow_schema,
    to_arrow_schema,
    warn_of_unknown_version,
)
from streamhouse.core.errors import UnsupportedError
from streamhouse.reading.follow.stream_lag import NEWEST_MEMBER


class Numbers(DataSourceStreamReader):
    """A stream of the numbers below `end`, with the methods of PySpark 4.2."""

    end = 0
    rows_max: int | None = None

    def getDefaultReadLimit(self) -> ReadLimit:
        assert self.rows_max is not None
        return ReadMaxRows(self.rows_max)

    def initialOffset(self) -> dict[str, Any]:
        return {"at": 0}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        assert most is not None or isinstance(limit, ReadAllAvailable)
        return {"at": self.end if most is None else min(self.end, start["at"] + most)}

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return {"at": self.end}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(number) for number in range(start["at"], end["at"])]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        yield partition.value


def of_an_old_spark(numbers: Numbers, rows_max: int | None) -> Any:
    numbers.rows_max = rows_max
    return OwnStepReader(numbers, in_steps=rows_max is not None, is_ending=False)


STEP = st.one_of(st.just("trigger"), st.just("restart"), st.integers(0, 9))


@given(steps=st.lists(STEP, max_size=30), rows_max=st.none() | st.integers(1, 5))
def test_a_reader_without_a_start_reads_each_row_once_in_its_own_steps(
    steps: list[str | int], rows_max: int | None
) -> None:
    """As Spark 4.0 and 4.1 call it: `latestOffset()` alone, and an empty range after a restart."""
    numbers, logged, read = Numbers(), None, list[int]()
    reader = of_an_old_spark(numbers, rows_max)
    for step in steps:
        if isinstance(step, int):
            numbers.end += step
        elif step == "restart":
            reader = of_an_old_spark(numbers, rows_max)
            if logged is not None:
                assert not reader.partitions(json.loads(logged), json.loads(logged))
        else:
            available = json.dumps(reader.latestOffset())
            if available == logged:
                assert len(read) == numbers.end, "Spark waits, though there are rows"
                continue
            start = json.loads(logged) if logged else reader.initialOffset()
            batch = [p.value for p in reader.partitions(start, json.loads(available))]
            assert batch or logged is None, "Spark runs an empty batch"
            assert len(batch) == min(numbers.end - len(read), rows_max or numbers.end)
            assert json.loads(available).get(NEWEST_MEMBER, {"at": 0}) == {"at": numbers.end}
            read += batch
            logged = available

    assert read == list(range(len(read)))


def test_times_keep_their_kind_in_every_version() -> None:
    schema = pa.schema([("at", pa.timestamp("us", tz="UTC")), ("local", pa.timestamp("us"))])

    spark_schema = from_arrow_schema(schema)

    assert [field.dataType for field in spark_schema] == [TimestampType(), TimestampNTZType()]
    assert to_arrow_schema(spark_schema).equals(schema)
    assert to_arrow_schema(StructType([])).names == []


def test_a_missing_feature_is_refused_by_name_with_the_version_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(functions, "arrow_udf", raising=False)

    with pytest.raises(UnsupportedError, match=r"^register_lookup needs PySpark 4\.1 or later"):
        arrow_function(len, "int", purpose="register_lookup")


def test_an_unknown_version_gets_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    warn_of_unknown_version.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unknown_version()
    monkeypatch.setattr(pyspark, "__version__", "4.4.0")
    warn_of_unknown_version.cache_clear()

    with pytest.warns(UserWarning, match=r"tested with PySpark 4\.0 to 4\.3, .* 4\.4\.0"):
        warn_of_unknown_version()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unknown_version()
    warn_of_unknown_version.cache_clear()
