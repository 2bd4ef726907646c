"""`serve --shards` with Kafka clients: each shard's port, and where clients are told it is."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from streamhouse.cli.server_commands.supervisor import shard_commands
from streamhouse.core.errors import InvalidRequestError


def _kafka_options(
    tmp_path: Path, count: int, port: int | None, advertised: tuple[str, int] | None
) -> list[dict[str, str]]:
    commands = shard_commands(
        [],
        count=count,
        data_dir=tmp_path,
        has_own_catalog=True,
        has_warehouse=False,
        kafka_port=port,
        kafka_advertised=advertised,
    )
    found = []
    for command in commands:
        words = list(command.arguments)
        pairs = itertools.pairwise(words)
        found.append({name: value for name, value in pairs if name.startswith("--kafka")})
    return found


def test_ports_go_up_from_the_first_shard(tmp_path: Path) -> None:
    assert _kafka_options(tmp_path, 3, 9092, ("lake.example", 19092)) == [
        {"--kafka-port": "9092", "--kafka-advertise": "lake.example:19092"},
        {"--kafka-port": "9093", "--kafka-advertise": "lake.example:19093"},
        {"--kafka-port": "9094", "--kafka-advertise": "lake.example:19094"},
    ]


def test_free_ports_are_picked_by_each_shard(tmp_path: Path) -> None:
    assert _kafka_options(tmp_path, 2, 0, None) == [{"--kafka-port": "0"}] * 2
    assert _kafka_options(tmp_path, 2, None, None) == [{}, {}]


@pytest.mark.parametrize(("port", "advertised"), [(65_534, None), (9092, ("lake.example", 65_534))])
def test_no_shard_has_a_port_that_is_none(
    tmp_path: Path, port: int, advertised: tuple[str, int] | None
) -> None:
    assert len(_kafka_options(tmp_path, 2, port, advertised)) == 2
    with pytest.raises(InvalidRequestError, match="shard 2 would have port 65536"):
        _kafka_options(tmp_path, 3, port, advertised)
