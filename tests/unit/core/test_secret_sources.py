"""Secrets come from private files and the environment, and errors never repeat one."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import pyiceberg
import pytest

from streamhouse.core.errors import InvalidRequestError, UnavailableError
from streamhouse.core.secret_sources import (
    WITHHELD_PROPERTY,
    catalog_properties_from,
    has_secret,
    is_private,
    read_private,
    read_secret,
    withheld_explained,
    without_secrets,
)
from streamhouse.lake.files.lake_filesystem import LakeFilesystem


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


# What the installed pyiceberg takes as properties of catalogs and file systems. A new one must be
# put into one of these: may a token that only reads a table have it?
_SECRET_NAMES = """
    adls.account-key adls.client-secret adls.connection-string adls.credential adls.sas-token
    adls.token auth.manager client.access-key-id client.secret-access-key client.session-token
    dynamodb.access-key-id dynamodb.secret-access-key dynamodb.session-token
    gcp.bigquery.credential-file gcp.bigquery.credentials-info gcs.oauth2.token
    gcs.oauth2.token-expires-at glue.access-key-id glue.secret-access-key glue.session-token
    hf.token s3.access-key-id s3.secret-access-key s3.session-token s3.signer s3.signer.endpoint
    s3.signer.uri vended-credentials
"""
_OPEN_NAMES = """
    adls.account-host adls.account-name adls.anon adls.blob-storage-authority
    adls.blob-storage-scheme adls.client-id adls.dfs-storage-authority adls.dfs-storage-scheme
    adls.tenant-id buffer-size client.profile-name client.region client.role-arn
    client.role-session-name dynamodb.profile-name dynamodb.region gcp.bigquery.location
    gcp.bigquery.project-id gcs.access gcs.cache-timeout gcs.consistency
    gcs.default-bucket-location gcs.project-id gcs.requester-pays gcs.service.host
    gcs.session-kwargs gcs.version-aware glue.endpoint glue.id glue.max-retries glue.profile-name
    glue.region glue.retry-mode glue.skip-archive hdfs.host hdfs.kerberos_ticket hdfs.port hdfs.user
    hf.endpoint hive.hive2-compatible hive.kerberos-authentication hive.kerberos-service-name
    iceberg.field.current iceberg.field.id iceberg.field.optional lock-check-max-wait-time
    lock-check-min-wait-time lock-check-retries namespace-identifier namespace-separator
    oauth2-server-uri py-catalog-impl py-io-impl rest-page-size rest.signing-name
    rest.signing-region rest.sigv4-enabled rest.sigv4.max-retries s3.anonymous s3.connect-timeout
    s3.endpoint s3.force-virtual-addressing s3.profile-name s3.proxy-uri s3.region
    s3.request-timeout s3.resolve-region s3.retry-strategy-impl s3.role-arn s3.role-session-name
    s3.server-side-encryption s3.sse-kms-key-id scan-planning-mode snapshot-loading-mode table-name
    view-endpoints-supported p.
"""


def _known_to_pyiceberg() -> set[str]:
    """The values of its constants that look like the names of properties."""
    folder = Path(pyiceberg.__file__).parent
    found = set()
    for file in (*folder.glob("catalog/**/*.py"), *folder.glob("io/*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
                node.value, ast.Constant
            ):
                found.add(str(node.value.value))
    return {name for name in found if re.fullmatch(r"[a-z0-9]+([._-][a-z0-9_-]*)+", name)}


def test_every_property_of_pyiceberg_is_known_as_a_secret_or_as_none() -> None:
    names = {name for name in _known_to_pyiceberg() if re.match(r"[a-z].*[.-]", name)}
    names = {name for name in names if not name.startswith(("org.apache.", "pyiceberg."))}

    assert names == {*_SECRET_NAMES.split(), *_OPEN_NAMES.split()}
    assert {name for name in names if has_secret(name, "x")} == set(_SECRET_NAMES.split())


def test_what_is_left_for_who_may_not_have_secrets() -> None:
    shown = without_secrets(
        {
            "type": "sql",
            "uri": "postgresql+psycopg2://me:hush@db:5432/lake?sslmode=require&password=hush2",
            "s3.secret-access-key": "hush3",
            "s3.proxy-uri": "http://[::1",
        }
    )

    assert shown == {
        "type": "sql",
        "uri": "postgresql+psycopg2://me@db:5432/lake?sslmode=require",
        WITHHELD_PROPERTY: "s3.proxy-uri, s3.secret-access-key, uri",
    }
    assert without_secrets({"type": "rest", "uri": "http://h"}) == {
        "type": "rest",
        "uri": "http://h",
    }


def test_an_error_for_want_of_a_secret_says_what_to_ask_for() -> None:
    given = without_secrets({"token": "hush", "type": "rest"})
    with pytest.raises(UnavailableError, match="read:lake") as told, withheld_explained(given):
        raise UnavailableError("catalog 'c' answers 401")

    assert told.value.message == (
        "catalog 'c' answers 401; the service keeps secrets of the lake (token) from this token:"
        " ask its operator for the grant 'read:lake', or give this process credentials of its own"
    )
    with pytest.raises(UnavailableError, match=r"^no$"), withheld_explained({"type": "rest"}):
        raise UnavailableError("no")


def test_a_file_that_cannot_be_read_for_want_of_a_secret_says_so() -> None:
    given = {"s3.secret-access-key": "hush", "s3.access-key-id": "hush", "s3.region": "x"}
    closed = {"s3.endpoint": "http://127.0.0.1:9", "s3.connect-timeout": "1"}
    files = LakeFilesystem(without_secrets({**given, **closed}))
    with pytest.raises(UnavailableError, match="ask its operator for the grant 'read:lake'"):
        files.size("s3://bucket/file.parquet")
