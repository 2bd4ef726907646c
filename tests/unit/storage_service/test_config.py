"""The service's configuration: texts in, a checked object out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamhouse.cli.server_commands.serve import command, help_sections
from streamhouse.core.errors import InvalidRequestError, UnknownOptionError
from streamhouse.core.model.merge_engine import MERGE_PROPERTY_HELP
from streamhouse.core.model.properties import PROPERTY_HELP
from streamhouse.core.model.records.record_format import RECORD_PROPERTY_HELP
from streamhouse.core.model.values.checks import CHECK_PROPERTY_HELP
from streamhouse.storage_service.config import ServiceConfig, is_loopback, kafka_address

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("body_bytes_max", "128mb", 128 << 20),
        ("body_bytes_max", "128MiB", 128 << 20),
        ("body_bytes_max", "67108864", 67_108_864),
        ("drain_timeout_ms", "30s", 30_000),
        ("tables_max", "7", 7),
    ],
)
def test_settings_are_read_in_their_unit(tmp_path: Path, name: str, text: str, value: int) -> None:
    config = ServiceConfig.from_texts({name: text}, data_dir=tmp_path)

    assert getattr(config, name) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tables_max", "many", "--tables-max = 'many' must be a number of tables"),
        ("tables_max", "²", "--tables-max = '²' must be a number of tables"),
        ("tables_max", "0", "--tables-max must be at least 1 tables"),
        ("body_bytes_max", "1light", "--body-bytes-max = '1light' must be a size"),
        ("body_bytes_max", "16mb", "batch_bytes_max = 33554432 must not exceed body_bytes_max"),
    ],
)
def test_a_bad_value_is_refused_by_name(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        ServiceConfig.from_texts({name: text}, data_dir=tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"is_standby": True}, "--standby needs --journal"),
        ({"shard": "1"}, "--shard needs --journal"),
        ({"advertised_endpoint": "http://a:1"}, "--advertise needs --journal"),
        ({"journal_url": "file:///j", "shard": "../x"}, "shard '../x' must be of a-z"),
        ({"journal_url": "file:///j", "journal_ack": "maybe"}, "--journal-ack 'maybe' must be"),
        ({"journal_url": "file:///j", "lease_ms": 3_600_001}, "--lease-ms must be at most"),
        ({"journal_url": "file:///j", "advertised_endpoint": "a:1"}, "--advertise 'a:1' must be"),
        ({"journal_url": "s3://b/p"}, "the lake must outlive this machine"),
    ],
)
def test_a_journal_that_cannot_be_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        ServiceConfig(data_dir=tmp_path, **settings)


def test_a_journal_elsewhere_needs_a_catalog_elsewhere(tmp_path: Path) -> None:
    catalog = {"type": "rest", "uri": "https://catalog"}

    config = ServiceConfig(data_dir=tmp_path, journal_url="s3://b/p", catalog_properties=catalog)

    assert config.has_own_catalog


def test_a_batch_larger_than_a_frame_holds_is_refused(tmp_path: Path) -> None:
    sizes = dict.fromkeys(
        ("batch_bytes_max", "body_bytes_max", "bodies_bytes_max", "commit_queue_bytes_max"), 2 << 30
    )

    with pytest.raises(InvalidRequestError, match="the most that a frame of the log holds"):
        ServiceConfig(data_dir=tmp_path, **sizes)


@pytest.mark.parametrize("name", ["lookup_keys_max", "metrics_tables_max"])
def test_a_limit_without_an_option_is_no_setting(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnknownOptionError, match=f"the service has no setting '{name}'"):
        ServiceConfig.from_texts({name: "1"}, data_dir=tmp_path)

    answer = CliRunner().invoke(command, [f"--{name.replace('_', '-')}", "1"])
    assert answer.exit_code == 2
    assert f"No such option '--{name.replace('_', '-')}'" in answer.output


def test_an_unknown_setting_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UnknownOptionError, match="did you mean 'tables_max'"):
        ServiceConfig.from_texts({"table_max": "1"}, data_dir=tmp_path)


def test_a_port_beyond_16_bits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"port 65536 is not in 0\.\.65535"):
        ServiceConfig(data_dir=tmp_path, port=65_536)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_a_host_others_can_reach_needs_a_token(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidRequestError, match="give --token-file or --grants, or bind"):
        ServiceConfig(data_dir=tmp_path, host=host)

    assert ServiceConfig(data_dir=tmp_path, host=host, token="secret").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    assert is_loopback(host)


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    config = ServiceConfig(
        data_dir=tmp_path, token="token-value", catalog_properties={"password": "password-value"}
    )

    assert "-value" not in repr(config)
    assert "-value" not in repr(config.lake_catalog())


def test_the_default_catalog_lies_in_the_data_directory(tmp_path: Path) -> None:
    catalog = ServiceConfig(data_dir=tmp_path).lake_catalog()

    assert catalog.name == "streamhouse"
    assert catalog.properties == {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/lake/catalog.db",
        "warehouse": f"file://{tmp_path}/lake/warehouse",
    }


def test_another_catalog_is_passed_on(tmp_path: Path) -> None:
    config = ServiceConfig(
        data_dir=tmp_path, catalog_name="glue", catalog_properties={"type": "glue"}
    )

    assert config.lake_catalog().to_json() == {"name": "glue", "properties": {"type": "glue"}}


def test_a_catalog_on_postgresql_finds_lost_connections_out(tmp_path: Path) -> None:
    uri = "postgresql+psycopg2://me@db/lake"

    found = ServiceConfig(data_dir=tmp_path, catalog_properties={"uri": uri}).lake_catalog()
    chosen = ServiceConfig(
        data_dir=tmp_path, catalog_properties={"uri": uri, "pool_pre_ping": "false"}
    ).lake_catalog()

    assert found.properties == {"type": "sql", "uri": uri, "pool_pre_ping": "true"}
    assert chosen.properties["pool_pre_ping"] == "false"


def _documented(*columns: str) -> list[tuple[str, ...]]:
    """The rows of the document's table with exactly these columns."""
    heading = "| " + " | ".join(columns) + " |\n"
    rows = DOCUMENT.read_text(encoding="utf-8").split(heading)[1].splitlines()[1:]
    table = rows[: [*rows, ""].index("")]
    return [tuple(cell.strip().strip("`") for cell in row[1:-1].split("|")) for row in table]


def test_every_limit_is_documented_as_it_is() -> None:
    assert _documented("option", "default", "unit", "meaning") == [
        (option.flag, option.written(option.default), option.unit, option.help)
        for option in ServiceConfig.options()
    ]


def test_every_limit_without_an_option_is_documented_as_it_is() -> None:
    assert _documented("limit", "value", "unit", "meaning") == [
        (limit.name, str(limit.default), limit.unit, limit.help)
        for limit in ServiceConfig.limits()
        if not limit.section
    ]


def test_the_help_shows_every_option_under_one_heading() -> None:
    shown = [name for names in help_sections().values() for name in names]

    # Every command gets `--config` when it is loaded by its name; whether it was depends on
    # the tests before this one.
    own = {str(parameter.name) for parameter in command.params} - {"config_file"}
    assert sorted(shown) == sorted(own)
    text = CliRunner().invoke(command, ["--help"]).output
    assert all(f"{heading}:" in text for heading in help_sections())
    assert all(parameter.opts[0] in text for parameter in command.params)


def test_every_table_property_is_documented_as_it_is() -> None:
    assert _documented("property", "default", "meaning") == [
        (key, default, text) for key, (default, text) in PROPERTY_HELP.items()
    ]


def test_every_merge_property_is_documented_as_it_is() -> None:
    assert _documented("property of primary key tables", "default", "meaning") == [
        (key, default, text) for key, (default, text) in MERGE_PROPERTY_HELP.items()
    ]


def test_every_property_of_constraints_is_documented_as_it_is() -> None:
    assert _documented("property of constraints", "default", "meaning") == [
        (key, default, text) for key, (default, text) in CHECK_PROPERTY_HELP.items()
    ]


def test_every_property_of_records_is_documented_as_it_is() -> None:
    assert _documented("property of Kafka's records", "default", "meaning") == [
        (key, default, text) for key, (default, text) in RECORD_PROPERTY_HELP.items()
    ]


def test_every_other_option_of_the_command_is_documented() -> None:
    elsewhere = {option.name for option in ServiceConfig.options()} | {"config_file"}

    assert [row[0] for row in _documented("option", "default", "meaning")] == [
        parameter.opts[0] for parameter in command.params if parameter.name not in elsewhere
    ]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("lake.example:9092", ("lake.example", 9092)),
        ("10.0.0.7:1", ("10.0.0.7", 1)),
        ("[fd00::7]:65535", ("fd00::7", 65_535)),
    ],
)
def test_where_kafka_clients_connect_is_a_host_and_a_port(
    text: str, address: tuple[str, int]
) -> None:
    assert kafka_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["", "lake.example", "lake.example:", ":9092", "a:0", "a:65536", "a b:9092"],
)
def test_where_kafka_clients_cannot_connect_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"--kafka-advertise .* must be HOST:PORT"):
        ServiceConfig(data_dir=tmp_path, kafka_port=9092, kafka_advertised=text)


def test_kafka_clients_are_told_a_place_only_where_they_are_served(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="--kafka-advertise needs --kafka-port"):
        ServiceConfig(data_dir=tmp_path, kafka_advertised="lake.example:9092")
    token = {"token": "t" * 32}
    with pytest.raises(InvalidRequestError, match="give --kafka-advertise HOST:PORT"):
        ServiceConfig(data_dir=tmp_path, host="0.0.0.0", kafka_port=9092, **token)
