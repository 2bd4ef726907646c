"""Secrets come from private files and the environment, and errors never repeat one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from streamhouse.storage_service.errors import InvalidRequestError
from streamhouse.storage_service.model.secret_sources import (
    catalog_properties_from,
    has_secret,
    is_private,
    read_private,
    read_secret,
)


def _file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    file = folder / "secret"
    file.write_bytes(content)
    file.chmod(mode)
    return file


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o644, 0o602, 0o666, 0o444])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = _file(tmp_path, b"s3cret", mode)

    with pytest.raises(InvalidRequestError, match="chmod 600 it") as refused:
        read_secret(file, kind="token")

    assert f"token file {file} may be read or written by others" in refused.value.message
    assert "s3cret" not in refused.value.message


@pytest.mark.parametrize(
    ("mode", "owner", "user", "expected"),
    [
        (0o600, 7, 7, True),
        (0o400, 7, 7, True),
        (0o640, 7, 7, False),
        # Secrets that are mounted for a service of another user.
        (0o640, 0, 7, True),
        (0o440, 0, 7, True),
        (0o640, 0, 0, False),
        (0o660, 0, 7, False),
        (0o644, 0, 7, False),
        (0o604, 0, 7, False),
    ],
)
def test_a_group_may_read_what_root_owns(mode: int, owner: int, user: int, expected: bool) -> None:
    assert is_private(mode, owner=owner, user=user) is expected


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"two\nlines", b"\x00", b"\xff"])
def test_what_is_no_single_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="token file"):
        read_secret(_file(tmp_path, content), kind="token")


def test_an_endless_file_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="more than 5 bytes"):
        read_private(_file(tmp_path, b"123456"), kind="token", bytes_max=5)
    with pytest.raises(InvalidRequestError, match="cannot be read: No such file"):
        read_private(tmp_path / "none", kind="token")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_private(tmp_path, kind="token")


def test_catalog_properties_name_a_file_or_a_variable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = _file(tmp_path, b"from a file\n")
    texts = ["type=sql", f"a.token=@file:{file}", "b.token=@env:TOKEN", "uri=x=@env:y", "c="]

    found = catalog_properties_from(texts, environ={"TOKEN": "from env"})

    assert found == {
        "type": "sql", "a.token": "from a file", "b.token": "from env", "uri": "x=@env:y", "c": "",
    }  # fmt: skip
    assert not caplog.records


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="--catalog-property t: the environment has no"):
        catalog_properties_from(["t=@env:NONE"], environ={"NONE": ""})
    with pytest.raises(InvalidRequestError, match=r"--catalog-property t file .* chmod 600"):
        catalog_properties_from([f"t=@file:{_file(tmp_path, b'x', 0o644)}"])


def test_a_secret_on_the_command_line_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        catalog_properties_from(["s3.secret-access-key=hush", "uri=postgresql://u:hush@h/d"])
        catalog_properties_from(["type=rest", "uri=http://h/iceberg", "s3.region=r"])

    assert len(caplog.records) == 2
    assert "s3.secret-access-key=@file:PATH" in caplog.text
    assert "hush" not in caplog.text


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("token", "x", True),
        ("credential", "id:secret", True),
        ("s3.access-key-id", "x", True),
        ("client.session-token", "x", True),
        ("gcs.oauth2.token", "x", True),
        ("adls.connection-string", "x", True),
        ("adls.sas-token.account", "x", True),
        ("header.Authorization", "Bearer x", True),
        ("uri", "postgresql+psycopg2://user:pw@host/db", True),
        ("uri", "postgresql://host/db?user=u&password=pw", True),
        ("s3.proxy-uri", "http://u:p@proxy", True),
        ("uri", "http://[::1", True),
        ("uri", "postgresql://user@host/db?connect_timeout=5", False),
        ("uri", "sqlite:////data/lake/catalog.db", False),
        ("warehouse", "s3://bucket/lake", False),
        ("s3.endpoint", "https://store:9000", False),
        ("s3.region", "eu-central-1", False),
        ("oauth2-server-uri", "https://login/tokens", False),
        ("token-refresh-enabled", "true", False),
        ("type", "rest", False),
        ("py-io-impl", "pyiceberg.io.pyarrow.PyArrowFileIO", False),
        ("streamhouse.service-id", "abc", False),
    ],
)
def test_what_is_a_secret(key: str, value: str, expected: bool) -> None:
    assert has_secret(key, value) is expected
