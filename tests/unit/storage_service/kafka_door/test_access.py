"""Who may do what through the Kafka door: tokens as passwords, grants, TLS, audit lines."""

from __future__ import annotations

import asyncio
import logging
import ssl
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.kafka.groups.coordinator import GroupLimits
from streamhouse.storage_service.server.access._grants import token_hash
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.http.tls import Certificate
from tests.support.certificates import make_certificates
from tests.support.fetch_world import fetch_values, fetched
from tests.support.in_process_service import (
    EVENTS,
    append_body,
    event_rows,
    table_descriptor,
    until,
)
from tests.support.kafka_world import KafkaClient, kafka_world

FETCH, METADATA, VERSIONS, HANDSHAKE, AUTHENTICATE, CREATE = 1, 3, 18, 17, 36, 19
JOIN, HEARTBEAT = 11, 12
TOKEN = "owner-token-0123456789"


def _grants(path: Path, **tokens: list[str]) -> Path:
    text = "\n".join(
        f'[[token]]\nname = "{name}"\nsha256 = "{token_hash(name.encode())}"\ngrants = {grants}\n'
        for name, grants in tokens.items()
    )
    path.write_text(text)
    path.chmod(0o600)
    return path


async def _sign_in(client: KafkaClient, token: str, *, version: int = 2) -> Any:
    handshake = await client.call(HANDSHAKE, 1, mechanism="PLAIN")
    assert handshake.error_code is ErrorCode.none
    return await client.call(AUTHENTICATE, version, auth_bytes=f"\0somebody\0{token}".encode())


@pytest.mark.parametrize("version", range(3))
async def test_the_token_is_the_password(tmp_path: Path, version: int) -> None:
    async with kafka_world(tmp_path, token=TOKEN) as world:
        client = await world.client()
        assert (await client.call(VERSIONS, 3)).error_code is ErrorCode.none

        answer = await _sign_in(client, TOKEN, version=version)

        assert answer.error_code is ErrorCode.none
        assert (await client.call(METADATA, 12, topics=None)).topics == ()


async def test_a_wrong_password_is_told_and_ends_the_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with kafka_world(tmp_path, token=TOKEN) as world:
        client = await world.client()
        with caplog.at_level(logging.WARNING, "streamhouse.audit"):
            answer = await _sign_in(client, "wrong")

        assert answer.error_code is ErrorCode.sasl_authentication_failed
        assert await client.is_closed()
        assert "code=unauthorized" in caplog.text
        assert "sasl_authenticate somebody" in caplog.text
        assert "wrong" not in caplog.text


async def test_nothing_is_answered_before_the_password(tmp_path: Path) -> None:
    async with kafka_world(tmp_path, token=TOKEN) as world:
        for key, values in ((METADATA, {"topics": None}), (CREATE, {"topics": []})):
            client = await world.client()
            client.send(key, 5, **values)
            assert await client.is_closed()
        large = await world.client()
        large.writer.write((1 << 20).to_bytes(4, "big") + bytes(100))
        assert await large.is_closed()


async def test_authenticate_needs_a_handshake_and_plain(tmp_path: Path) -> None:
    async with kafka_world(tmp_path, token=TOKEN) as world:
        client = await world.client()
        other = await client.call(HANDSHAKE, 1, mechanism="GSSAPI")
        answer = await client.call(AUTHENTICATE, 2, auth_bytes=f"\0a\0{TOKEN}".encode())

        assert other.error_code is ErrorCode.unsupported_sasl_mechanism
        assert other.mechanisms == ("PLAIN",)
        assert answer.error_code is ErrorCode.illegal_sasl_state
        assert await client.is_closed()


async def test_who_may_read_no_table_is_in_no_group(tmp_path: Path) -> None:
    grants = _grants(
        tmp_path / "grants",
        nothing_0123456789=[],
        keeper_0123456789=["admin:service", "read:lake"],
        reader_0123456789=["read:default.events"],
    )
    async with kafka_world(tmp_path / "data", grants_file=grants) as world:
        answers = []
        for name in ("nothing", "keeper", "reader"):
            client = await world.client()
            await _sign_in(client, f"{name}_0123456789")
            joined = await client.call(
                JOIN,
                9,
                group_id=name,
                session_timeout=timedelta(minutes=1),
                rebalance_timeout=timedelta(minutes=1),
                member_id="",
                protocol_type="consumer",
                protocols=[{"name": "range", "metadata": b""}],
            )
            answers.append(joined.error_code)

        refused = ErrorCode.group_authorization_failed
        assert answers == [refused, refused, ErrorCode.member_id_required]


async def test_any_password_will_do_where_none_is_asked_for(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        answer = await _sign_in(await world.client(), "anything")

        assert answer.error_code is ErrorCode.none


async def test_grants_are_those_of_tables(tmp_path: Path) -> None:
    grants = _grants(
        tmp_path / "grants",
        reader_0123456789=["read:default.events"],
        maker_0123456789=["admin:default.mine"],
    )
    async with kafka_world(tmp_path / "data", grants_file=grants) as world:
        for name in ("events", "secret"):
            await world.service.manager.create_table(table_descriptor(name))
        reader, maker = await world.client(), await world.client()
        await _sign_in(reader, "reader_0123456789")
        await _sign_in(maker, "maker_0123456789")

        every = await reader.call(METADATA, 12, topics=None)
        named = await reader.call(
            METADATA,
            12,
            topics=[{"name": n} for n in ("events", "secret", "none")],
            allow_auto_topic_creation=True,
        )
        topics = [
            {"name": n, "num_partitions": 1, "replication_factor": 1} for n in ("mine", "other")
        ]
        made = await maker.call(CREATE, 7, topics=topics)

        assert [t.name for t in every.topics] == ["events"]
        assert [t.error_code.name for t in named.topics] == [
            "none",
            "topic_authorization_failed",
            "topic_authorization_failed",
        ]
        assert [t.error_code.name for t in made.topics] == ["none", "topic_authorization_failed"]


async def test_a_revoked_token_ends_its_connection(tmp_path: Path) -> None:
    grants = _grants(tmp_path / "grants", reader_0123456789=["read:default.events"])
    async with kafka_world(
        tmp_path / "data", grants_file=grants, grants_check_interval_ms=1
    ) as world:
        client = await world.client()
        await _sign_in(client, "reader_0123456789")
        await client.call(METADATA, 12, topics=None)
        grants.write_text("")

        async def ask_on() -> None:
            # The file is looked at once a millisecond.
            while True:
                await client.call(METADATA, 12, topics=None)

        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await ask_on()


async def test_a_member_whose_token_is_revoked_is_out_of_its_group(tmp_path: Path) -> None:
    grants = _grants(tmp_path / "grants", reader_0123456789=["read:default.events"])
    async with kafka_world(
        tmp_path / "data", grants_file=grants, grants_check_interval_ms=1
    ) as world:
        coordinator = world.door._broker.groups.coordinator
        coordinator._limits = GroupLimits(initial_delay_s=0)
        client = await world.client()
        await _sign_in(client, "reader_0123456789")
        session = timedelta(minutes=30)
        protocols = [{"name": "range", "metadata": b"all"}]
        joined = await client.call(
            *(JOIN, 1),
            group_id="g",
            session_timeout=session,
            rebalance_timeout=session,
            protocol_type="consumer",
            protocols=protocols,
        )
        assert joined.error_code is ErrorCode.none
        assert coordinator.member_count() == 1
        grants.write_text("")

        async def heartbeat_on() -> None:
            while True:
                await client.call(
                    HEARTBEAT, 0, group_id="g", member_id=joined.member_id, generation_id=1
                )

        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await heartbeat_on()
        assert coordinator.member_count() == 0


@pytest.mark.parametrize("is_revoked", [True, False])
async def test_who_may_not_read_any_more_gets_no_rows_that_it_waits_for(
    tmp_path: Path, is_revoked: bool
) -> None:
    grants = _grants(tmp_path / "grants", reader=["read:*"], boss=["admin:*"])
    async with kafka_world(
        tmp_path / "data", grants_file=grants, grants_check_interval_ms=1
    ) as world:
        owner = {"authorization": "Bearer boss"}
        made = await world.http.call(
            "POST", "/v1/tables", headers=owner, json_body=table_descriptor("events").to_json()
        )
        assert made.status == 201
        client = await world.client()
        await _sign_in(client, "reader")
        number = client.send(FETCH, 11, **fetch_values({"events": {0: 0}}, wait_ms=20_000))
        await until(lambda: world.service.manager.waiter_limit.count == 1)

        left = {"boss": ["admin:*"]} if is_revoked else {"reader": [], "boss": ["admin:*"]}
        _grants(grants, **left)
        body = append_body(EVENTS, [(0, 0, event_rows(0, 5))])
        await world.http.call("POST", "/v1/tables/events/append", headers=owner, body=body)

        if is_revoked:
            assert await client.is_closed()
        else:
            answer = await client.answer(FETCH, 11, number)
            assert fetched(answer) == {("events", 0): ErrorCode.topic_authorization_failed}


async def test_who_may_not_read_any_more_gets_no_rows_that_there_was_no_room_for(
    tmp_path: Path,
) -> None:
    grants = _grants(tmp_path / "grants", reader=["read:*"], boss=["admin:*", "write:*"])
    async with kafka_world(
        tmp_path / "data", grants_file=grants, grants_check_interval_ms=1
    ) as world:
        owner = {"authorization": "Bearer boss"}
        made = await world.http.call(
            "POST", "/v1/tables", headers=owner, json_body=table_descriptor("events").to_json()
        )
        assert made.status == 201
        body = append_body(EVENTS, [(0, 0, event_rows(0, 20_000))])
        await world.http.call("POST", "/v1/tables/events/append", headers=owner, body=body)
        client = await world.client()
        await _sign_in(client, "reader")
        answers = world.service.answers
        taken = world.service.config.answers_bytes_max
        answers.take("others", taken)
        number = client.send(FETCH, 11, **fetch_values({"events": {0: 0}}))
        await until(lambda: answers._waiting)

        _grants(grants, reader=[], boss=["admin:*", "write:*"])

        def may_read() -> bool:
            caller = world.service.access.caller_of(b"reader")
            assert caller is not None
            return caller.may(Level.READ, "default.events")

        await until(lambda: not may_read())
        answers.give_back("others", taken)
        answer = await client.answer(FETCH, 11, number)
        assert fetched(answer) == {("events", 0): ErrorCode.topic_authorization_failed}


async def test_the_door_speaks_tls_with_the_services_certificate(tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "tls", host="IP:127.0.0.1")
    settings: dict[str, Any] = {
        "tls_certificate_file": files.certificate,
        "tls_key_file": files.key,
        "token": TOKEN,
    }
    certificate = Certificate(ServiceConfig(data_dir=tmp_path / "data", **settings))
    async with kafka_world(tmp_path / "data", certificate=certificate, **settings) as world:
        client = await world.client(ssl=ssl.create_default_context(cafile=str(files.ca)))

        assert (await _sign_in(client, TOKEN)).error_code is ErrorCode.none
        assert (await client.call(METADATA, 12, topics=None)).topics == ()
        plain = await world.client()
        plain.send(VERSIONS, 3)
        assert await plain.is_closed()


async def test_asking_tries_to_make_few_topics_at_a_time(tmp_path: Path) -> None:
    grants = _grants(tmp_path / "grants", reader_0123456789=["read:*"])
    async with kafka_world(tmp_path / "data", grants_file=grants) as world:
        client = await world.client()
        await _sign_in(client, "reader_0123456789")

        asked = [{"name": f"t{number}"} for number in range(102)]
        answer = await client.call(METADATA, 12, topics=asked, allow_auto_topic_creation=True)

        assert [topic.error_code for topic in answer.topics] == [
            *[ErrorCode.topic_authorization_failed] * 100,
            *[ErrorCode.unknown_topic_or_partition] * 2,
        ]


async def test_who_may_not_make_a_topic_is_told_that_first(tmp_path: Path) -> None:
    grants = _grants(tmp_path / "grants", maker_0123456789=["admin:default.mine"])
    async with kafka_world(tmp_path / "data", grants_file=grants) as world:
        maker = await world.client()
        await _sign_in(maker, "maker_0123456789")
        configs = [{"name": "no.such.setting", "value": "1"}]
        topics = [
            {"name": n, "num_partitions": 1, "replication_factor": 1, "configs": configs}
            for n in ("mine", "other")
        ]

        made = await maker.call(CREATE, 7, topics=topics)

        assert [t.error_code for t in made.topics] == [
            ErrorCode.invalid_config,
            ErrorCode.topic_authorization_failed,
        ]
