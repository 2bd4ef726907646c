"""Query parameters: read, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from streamhouse.core.errors import (
    InvalidRequestError,
    StreamhouseError,
    UnknownColumnError,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.server.http._parameters import column_names, integer, offsets
from tests.support.in_process_service import table_descriptor

TABLE = TableInfo(descriptor=table_descriptor(bucket_count=2), table_id=1, created_at_us=0)


def test_numbers_columns_and_offsets_are_read() -> None:
    assert integer("offset", "42", least=0) == 42
    assert column_names(None, TABLE) is None
    assert column_names("name,id", TABLE) == ["name", "id"]
    assert column_names('["id"]', TABLE) == ["id"]
    assert offsets("start", '{"1": 7}', TABLE, table_id=TABLE.table_id) == {1: 7}


@pytest.mark.parametrize(
    ("read", "error", "message"),
    [
        (lambda: integer("offset", "-1", least=0), InvalidRequestError, "offset = '-1' must be a"),
        (lambda: integer("offset", "1.5", least=0), InvalidRequestError, "whole number from 0 on"),
        (lambda: integer("offset", "٣", least=0), InvalidRequestError, "whole number"),
        (lambda: integer("offset", "9" * 19, least=0), InvalidRequestError, "whole number"),
        (lambda: integer("offset", "9" * 5_000, least=0), InvalidRequestError, "whole number"),
        (lambda: integer("max_bytes", "0", least=1), InvalidRequestError, "from 1 on"),
        (lambda: column_names("", TABLE), UnknownColumnError, "has no column ''"),
        (lambda: column_names("[]", TABLE), InvalidRequestError, "at least one column"),
        (lambda: column_names("id,id", TABLE), InvalidRequestError, "each once"),
        (lambda: column_names("[1]", TABLE), InvalidRequestError, "must be column names"),
        (lambda: column_names("[", TABLE), InvalidRequestError, "no JSON list"),
        (lambda: column_names("nam", TABLE), UnknownColumnError, "did you mean 'name'"),
        (
            lambda: offsets("start", "earliest", TABLE, table_id=TABLE.table_id),
            InvalidRequestError,
            'as in {"0": 12}',
        ),
        (
            lambda: offsets("start", "[]", TABLE, table_id=TABLE.table_id),
            InvalidRequestError,
            'as in {"0": 12}',
        ),
        (
            lambda: offsets("start", '{"a": 1}', TABLE, table_id=TABLE.table_id),
            InvalidRequestError,
            'as in {"0": 12}',
        ),
        (
            lambda: offsets("start", '{"2": 1}', TABLE, table_id=TABLE.table_id),
            InvalidRequestError,
            "no bucket 2",
        ),
        (
            lambda: offsets("start", '{"0": -1}', TABLE, table_id=TABLE.table_id),
            InvalidRequestError,
            "offset -1 of bucket",
        ),
        (
            lambda: offsets("start", '{"0": true}', TABLE, table_id=TABLE.table_id),
            InvalidRequestError,
            "offset True",
        ),
    ],
)
def test_a_bad_parameter_is_refused_by_name(
    read: Callable[[], object], error: type[StreamhouseError], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        read()
