"""Options: read once, checked, named in errors with a suggestion."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from streamhouse.connector.write._write_options import write_options
from streamhouse.core.errors import InvalidRequestError, UnknownOptionError
from streamhouse.core.model.values.positions import EARLIEST, LATEST
from streamhouse.reading.options.connection import connection_options
from streamhouse.reading.options.options import (
    ALL_USES,
    BATCH,
    OPTIONS,
    STREAM,
    WRITE,
    ZONE_MARK,
    Option,
    applicable,
    as_options,
    check_keys,
    read_options,
    shape_options,
)
from streamhouse.reading.options.quoted_names import quoted_list

TABLE = {"path": "db.t"}


def test_defaults_of_a_read() -> None:
    options = read_options(TABLE, use=STREAM)

    assert options.columns is None
    assert options.where is None
    assert options.starting.kind == "full"
    assert options.fail_on_data_loss
    assert options.max_offsets_per_trigger == 10_000_000
    assert options.long_poll_ms == 300
    assert options.max_split_bytes == 128 << 20


def test_keys_come_in_any_case() -> None:
    given = {"PATH": "db.t", "includemetadata": "TRUE", "StartingOffsets": "Earliest"}

    options = read_options(given, use=BATCH)

    assert options.include_metadata
    assert options.starting.kind == "earliest"


@pytest.mark.parametrize(
    ("key", "closest"),
    [("colums", "columns"), ("maxOffsetPerTrigger", "maxOffsetsPerTrigger"), ("bucket.nun", "")],
)
def test_an_unknown_option_is_an_error_with_a_suggestion(key: str, closest: str) -> None:
    with pytest.raises(UnknownOptionError, match=f"unknown option '{key.lower()}'") as caught:
        read_options(TABLE | {key: "x"}, use=STREAM)

    assert f"did you mean '{closest}'" in caught.value.message or not closest


@pytest.mark.parametrize(
    ("use", "key"),
    [(BATCH, "maxOffsetsPerTrigger"), (STREAM, "asOfSnapshot"), (BATCH, "bucket.num")],
)
def test_an_option_its_use_would_ignore_is_an_error(use: str, key: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"'{key}' has no meaning for a {use}"):
        read_options(TABLE | {key: "1"}, use=use)


def test_a_table_property_belongs_to_writes() -> None:
    with pytest.raises(InvalidRequestError, match=r"'table.log.ttl' has no meaning for a batch"):
        read_options(TABLE | {"table.log.ttl": "1d"}, use=BATCH)

    assert write_options(TABLE | {"table.log.ttl": "1d"}).properties == {"table.log.ttl": "1d"}


def test_keys_of_spark_itself_pass() -> None:
    spark = {"checkpointLocation": "/c", "owner": "me", "provider": "x", "queryName": "q"}

    assert set(check_keys(TABLE | spark, uses=(STREAM,))) == {"path", *map(str.lower, spark)}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"includeMetadata": "1"}, "'includeMetadata' = '1' must be true or false"),
        ({"minPartitions": "0"}, "'minPartitions' = '0' must be a whole number from 1"),
        ({"longPollMs": "10001"}, "must be a whole number from 0 to 10000"),
        ({"maxSplitBytes": "big"}, "option 'maxSplitBytes' = 'big' must be a size"),
        ({"columns": "a,,b"}, "'columns' = 'a,,b' must name columns"),
        ({"columns": "a,a"}, "must name columns, each once"),
        ({"columns": "`a"}, "open backtick"),
    ],
)
def test_a_bad_value_names_option_and_value(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidRequestError, match=sentence):
        read_options(TABLE | options, use=STREAM)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"startingOffsets": "latest"}, "would read nothing"),
        ({"startingOffsets": "2026-01-01", "startingTimestamp": "2025-01-01"}, "both give a time"),
        (
            {"asOfSnapshot": "1", "asOfTimestamp": "2025-01-01"},
            "cannot be combined with 'asOfTimestamp'",
        ),
        ({"asOfSnapshot": "1", "startingOffsets": "earliest"}, "with 'startingOffsets'"),
        ({"asOfTimestamp": "2025-01-01", "endingTimestamp": "2025-01-02"}, "both end the read"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidRequestError, match=sentence):
        read_options(TABLE | options, use=BATCH)


@pytest.mark.parametrize("key", ["where", "includeMetadata", "asOfSnapshot", "minPartitions"])
def test_options_that_choose_rows_mean_nothing_to_metadata(key: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"'{key}' has no meaning for 'db.t\$files'"):
        read_options({"path": "db.t$files", key: "1"}, use=BATCH)

    assert read_options({"path": "db.t$files", "columns": "path"}, use=BATCH).columns == ("path",)


def test_times_become_microseconds_and_as_of_includes_its_instant() -> None:
    options = read_options(
        TABLE
        | {"startingTimestamp": "2001-09-09T02:46:41+01:00", "asOfTimestamp": "1700000000123"},
        use=BATCH,
    )

    assert options.from_timestamp_us == 1_000_000_001_000_000
    assert options.to_timestamp_us == 1_700_000_000_123_001


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [
        ("0", 0),
        ("10000000000", 10_000_000_000_000),
        ("1700000000123", 1_700_000_000_123_000),
        ("9234567890123", 9_234_567_890_123_000),
        ("10000000000000", 10_000_000_000_000),
        ("1700000000123456", 1_700_000_000_123_456),
        ("2023-11-14T22:13:20.123456Z", 1_700_000_000_123_456),
        ("2023-11-14 22:13:20.123456", 1_700_000_000_123_456),
        ("2023-11-15 03:43:20.123456+05:30", 1_700_000_000_123_456),
    ],
)
def test_a_time_is_milliseconds_or_microseconds_by_its_size(text: str, microseconds: int) -> None:
    for key in ("startingTimestamp", "startingOffsets"):
        assert read_options(TABLE | {key: text}, use=BATCH).from_timestamp_us == microseconds
    for key in ("endingTimestamp", "asOfTimestamp"):
        end = read_options(TABLE | {key: text}, use=BATCH).to_timestamp_us
        assert end == microseconds + (key == "asOfTimestamp")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1700000000", "has 10 digits, .* multiply seconds by 1000"),
        ("1", "has 1 digits, .* nor microseconds"),
        ("1700000000123456789", "has 19 digits, .* divide nanoseconds by 1000"),
        ("17000000001234567", "has 17 digits"),
        ("-1700000000123", "before May 1970 or after 2262"),
        ("1970-01-20T16:00:00Z", "before May 1970 or after 2262"),
        ("1969-12-31T23:59:59Z", "before May 1970 or after 2262"),
        ("2263-01-01T00:00:00Z", "before May 1970 or after 2262"),
        ("9999999999999", "before May 1970 or after 2262"),
        ("2026-13-01", "is not a time: write ISO-8601"),
    ],
)
@pytest.mark.parametrize("key", ["asOfTimestamp", "startingTimestamp", "startingOffsets"])
def test_a_time_that_no_row_can_have_is_refused(key: str, text: str, sentence: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"option '{key}' = '{text}' .*{sentence}"):
        read_options(TABLE | {key: text}, use=BATCH)


def test_a_time_without_a_zone_is_in_the_session_s_or_in_the_option_s() -> None:
    noon = {"asOfTimestamp": "2026-07-01 12:00", "__streamhouse_time_zone": "America/New_York"}

    in_session = read_options(TABLE | noon, use=BATCH).as_of_timestamp_us
    in_option = read_options(TABLE | noon | {"timeZone": "GMT+2"}, use=BATCH).as_of_timestamp_us
    named = read_options(TABLE | noon | {"asOfTimestamp": "2026-07-01T12:00Z"}, use=BATCH)

    assert (in_session or 0) - (in_option or 0) == 6 * 3600 * 1_000_000
    assert (in_session or 0) - (named.as_of_timestamp_us or 0) == 4 * 3600 * 1_000_000


@pytest.mark.parametrize(("number", "word"), [("-1", "latest"), ("-2", "earliest")])
def test_a_number_of_kafka_is_answered_with_its_word(number: str, word: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"'{number}' is Kafka's number: write '{word}'"):
        read_options(TABLE | {"startingOffsets": number}, use=STREAM)


def test_a_zone_that_is_not_known_is_refused_also_where_no_time_needs_it() -> None:
    lost = TABLE | {"timeZone": "Europe/Nowhere"}

    for times in ({}, {"asOfTimestamp": "2026-07-01T12:00"}):
        with pytest.raises(InvalidRequestError, match="'timeZone' = 'Europe/Nowhere' is not a"):
            read_options(lost | times, use=BATCH)


def test_a_zone_of_the_session_is_looked_up_where_a_time_needs_it() -> None:
    lost = TABLE | {ZONE_MARK: "Europe/Nowhere"}

    assert read_options(lost, use=BATCH)
    with pytest.raises(InvalidRequestError, match="'Europe/Nowhere' is not a time zone"):
        read_options(lost | {"asOfTimestamp": "2026-07-01T12:00"}, use=BATCH)


def test_offsets_may_name_ends() -> None:
    options = read_options(
        TABLE
        | {"startingOffsets": '{"0": 5, "1": "earliest"}', "endingOffsets": '{"0": "latest"}'},
        use=BATCH,
    )

    assert options.starting.offsets == {0: 5, 1: EARLIEST}
    assert options.ending == {0: LATEST}


@pytest.mark.parametrize("text", ["{", '{"a": 1}', '{"0": -3}', '{"0": 1.5}', '{"0": true}', "[1]"])
def test_offsets_that_are_none(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="'startingOffsets'"):
        read_options(TABLE | {"startingOffsets": text}, use=BATCH)


@pytest.mark.parametrize(
    "text",
    [
        '{"0": %s}' % ("[" * 100_000),
        '{"%s": 1}' % ("9" * 5_000),
        '{"0": %s}' % ("9" * 5_000),
        '{"\N{ARABIC-INDIC DIGIT THREE}": 1}',
        '{"0": "\N{FULLWIDTH DIGIT FIVE}"}',
        '{"0": 1e3}',
    ],
)
@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
def test_hostile_offsets_are_refused_in_a_sentence(option: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"'{option}'") as refused:
        read_options(TABLE | {option: text}, use=BATCH)

    assert len(str(refused.value)) < 1_000


@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
@pytest.mark.parametrize("text", ['{"0": 1, "0": 2}', '{"0": 1, "00": 2}'])
def test_a_bucket_has_one_offset(option: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"'{option}'.* names .*0'? twice"):
        read_options(TABLE | {option: text}, use=BATCH)


def test_a_bucket_of_a_dict_has_one_offset() -> None:
    with pytest.raises(InvalidRequestError, match="startingOffsets names something twice"):
        as_options({"startingOffsets": {0: 1, "0": 2}})


@pytest.mark.parametrize("text", ["earliest", '{"0": "earliest"}', "12"])
def test_a_read_ends_at_no_such_place(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="'endingOffsets'"):
        read_options(TABLE | {"endingOffsets": text}, use=BATCH)


def test_columns_may_hold_commas_in_backticks() -> None:
    assert shape_options(TABLE | {"columns": "a, `b,c` ,d"}).columns == ("a", "b,c", "d")


def test_columns_may_have_any_name() -> None:
    names = ("a`b", "`a`", "`", "``", "a", " a ", "a,b", "f(a", "a``b`", "null")

    assert shape_options(TABLE | {"columns": quoted_list(names)}).columns == names


def test_how_to_create_a_table() -> None:
    options = write_options(
        TABLE
        | {"bucket.num": "4", "bucket.key": "a,b", "partitioned.by": "bucket(16, id), day(ts)"}
    )

    assert options.bucket_count == 4
    assert options.bucket_key == ("a", "b")
    assert options.partitioned_by == ("bucket(16, id)", "day(ts)")


def test_a_write_without_a_transaction() -> None:
    assert write_options(TABLE).is_transactional
    assert not write_options(TABLE | {"write.transactional": "false"}).is_transactional

    with pytest.raises(InvalidRequestError, match=r"'write.transactional' = 'false': set that"):
        write_options(TABLE | {"write.mode": "direct"})
    with pytest.raises(InvalidRequestError, match=r"remove 'write.transactional'"):
        write_options(TABLE | {"write.transactional": "false", "app.id": "nightly"})


def test_a_part_of_a_table_cannot_be_written() -> None:
    with pytest.raises(InvalidRequestError, match=r"'db.t\$log' can only be read; write to 'db.t'"):
        write_options({"path": "db.t$log"})


def test_which_service_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMHOUSE_ENDPOINT", "http://env:1")
    monkeypatch.setenv("STREAMHOUSE_TOKEN", "from-env")

    assert connection_options(TABLE).endpoint == "http://env:1"
    assert connection_options(TABLE).token == "from-env"
    given = connection_options(TABLE | {"endpoint": "http://opt:2", "table": "other.t"})
    assert given.endpoint == "http://opt:2"
    assert str(given.name) == "other.t"


@pytest.mark.parametrize("options", [{}, {"path": ""}])
def test_no_table(options: dict[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match=r"call load\('database.table'\)"):
        connection_options(options)


def test_several_tables() -> None:
    with pytest.raises(InvalidRequestError, match="one table at a time"):
        connection_options({"paths": '["a","b"]'})


def test_a_token_shows_in_no_repr_but_travels() -> None:
    options = read_options(TABLE | {"token": "s3cret"}, use=BATCH)

    assert "s3cret" not in repr(options)
    assert pickle.loads(pickle.dumps(options)).connection.token == "s3cret"


def test_attached_options_apply_where_they_have_a_meaning() -> None:
    given = {"where": "a = 1", "endpoint": "e", "bucket.num": "2", "table.log.ttl": "1d"}

    assert set(applicable(given, uses=(WRITE,))) == {"endpoint", "bucket.num", "table.log.ttl"}
    assert set(applicable(given, uses=(BATCH,))) == {"where", "endpoint"}
    assert applicable(given, uses=ALL_USES) == given


def test_keyword_arguments_become_option_text() -> None:
    assert as_options({"a": True, "b": 3}) == {"a": "true", "b": "3"}


def test_positions_are_dicts_or_their_json() -> None:
    given = {"startingOffsets": {0: np.int64(3), 1: "earliest"}, "endingOffsets": '{"0": 9}'}

    options = read_options(TABLE | as_options(given), use=BATCH)

    assert dict(options.starting.offsets) == {0: 3, 1: EARLIEST}
    assert options.ending == {0: 9}


@pytest.mark.parametrize("offsets", [{0: True}, {0: 1.5}, {"a": 1}, {0: None}, {-1: 0}])
def test_a_dict_that_is_no_position_is_refused(offsets: dict[object, object]) -> None:
    with pytest.raises(InvalidRequestError, match="is a whole number"):
        read_options(TABLE | as_options({"startingOffsets": offsets}), use=BATCH)


@pytest.mark.parametrize("blank", ["", "  "])
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_an_option_without_a_value_is_refused(option: Option, blank: str) -> None:
    given = TABLE | {option.key: blank}

    for use in option.uses:
        with pytest.raises(InvalidRequestError, match=f"option '{option.key}' is empty"):
            write_options(given) if use == WRITE else read_options(given, use=use)


def test_who_answers_lookups_travels_with_the_endpoint() -> None:
    both = TABLE | {"endpoint": "http://a:1,http://b:1#failover_s=7"}

    given = connection_options(both | {"read.from": "any"})

    assert given.endpoint == "http://a:1,http://b:1#failover_s=7&read_from=any"
    with pytest.raises(InvalidRequestError, match="read_from is one of owner, any"):
        connection_options(both | {"read.from": "all"})
