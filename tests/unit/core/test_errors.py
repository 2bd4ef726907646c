"""What errors carry from one process to another."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.errors import (
    InvalidRequestError,
    NotOwnerError,
    StreamhouseError,
    TableNotFoundError,
    UnavailableError,
    error_for_code,
    suggestion,
)
from streamhouse.storage_service.kafka.protocol_errors import (
    InvalidRecordsError,
    UnknownLeaderEpochError,
)
from streamhouse.storage_service.server.http.http_exchange import error_to_json


@pytest.mark.parametrize("owner", ["http://b:1", None])
def test_who_the_owner_is_crosses_the_wire_and_processes(owner: str | None) -> None:
    error = NotOwnerError("go elsewhere", owner=owner)

    detail = error_to_json(error, request_id="r1")["error"]
    read = error_for_code(detail["code"], detail["message"], owner=detail["owner"])

    assert detail["retriable"] is True
    for copy in (read, pickle.loads(pickle.dumps(error))):
        assert isinstance(copy, NotOwnerError)
        assert (copy.message, copy.owner) == ("go elsewhere", owner)


@pytest.mark.parametrize("kind", [InvalidRequestError, TableNotFoundError, UnavailableError])
def test_a_code_names_no_kind_of_the_error_that_a_part_of_the_service_has(
    kind: type[StreamhouseError],
) -> None:
    assert InvalidRecordsError.code == InvalidRequestError.code
    assert UnknownLeaderEpochError.code == UnavailableError.code

    assert type(error_for_code(kind.code, "why")) is kind


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("nmae", ["id", "name"], "name"),
        ("eror", ["error", "errors"], "error"),
        ("default.eror", ["default.errors", "other.eror"], "default.errors"),
        ("primaryKey", ["primary.key", "bucket.key"], "primary.key"),
        ("STREAMHOUSE_SERVE_DATADIR", ["STREAMHOUSE_SERVE_DATA_DIR"], "STREAMHOUSE_SERVE_DATA_DIR"),
        ("table.log.tll", ["table.log.ttl", "table.lag.tll"], "table.lag.tll"),
        ("startingOffset", ["endingOffsets", "startingOffsets"], "startingOffsets"),
        # A common beginning makes nothing near, and neither does one letter of two.
        ("default.orders", ["default.clicks", "default.items"], ""),
        ("table.log.foo", ["table.log.ttl"], ""),
        ("STREAMHOUSE_PORT", ["STREAMHOUSE_HOST_NAME", "STREAMHOUSE_TOKEN"], ""),
        ("x", ["y"], ""),
        ("if", ["id"], ""),
        ("price", ["region", "item"], ""),
        ("region", ["origin_of_it"], ""),
        ("anything", [], ""),
        ("", ["a"], ""),
    ],
)
def test_only_a_name_that_is_near_is_suggested(name: str, known: list[str], meant: str) -> None:
    assert suggestion(name, known) == (f"; did you mean '{meant}'?" if meant else "")


@given(
    name=st.text("abc._", max_size=8), other=st.text("abc._", max_size=8), slip=st.integers(0, 7)
)
def test_one_slip_in_a_word_is_near_and_what_is_near_is_so_both_ways(
    name: str, other: str, slip: int
) -> None:
    assert bool(suggestion(name, [other])) == bool(suggestion(other, [name]))
    word = f"w{name.replace('.', 'x').replace('_', 'y')}rd"
    dropped = word[: slip % len(word)] + word[slip % len(word) + 1 :]
    assert suggestion(dropped, [word])
