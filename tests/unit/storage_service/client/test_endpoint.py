"""Endpoints: a URL, and what vouches for its certificate."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from streamhouse.storage_service.client.endpoint import (
    CA_VARIABLE,
    Endpoint,
    parse_endpoint,
    with_ca_file,
)
from streamhouse.storage_service.errors import InvalidRequestError
from tests.support.certificates import make_certificates


def test_what_an_endpoint_says() -> None:
    assert parse_endpoint("http://h:1/") == Endpoint(url="http://h:1")
    assert parse_endpoint("https://h:1#sha256=ab") == Endpoint(url="https://h:1", fingerprint="ab")
    assert parse_endpoint("https://h:1/#ca=/a%20b.pem") == Endpoint(
        url="https://h:1", ca_file="/a b.pem"
    )


def test_a_ca_file_travels_with_the_endpoint() -> None:
    endpoint = with_ca_file("https://h:1#ca=/old.pem", "/etc/a b#&=.pem")

    assert parse_endpoint(endpoint) == Endpoint(url="https://h:1", ca_file="/etc/a b#&=.pem")


def test_a_ca_file_for_plain_http_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="a CA file needs an endpoint https"):
        with_ca_file("http://h:1", "/ca.pem")


@pytest.mark.parametrize(
    "text",
    [
        *("h:1", "ftp://h", "https://", "https://h#x=1", "https://h#ca"),
        *("http://h:x", "http://h:0", "http://h:99999", "http://h?a=b"),
    ],
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not a URL like"):
        parse_endpoint(text)


def test_a_password_in_an_endpoint_is_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidRequestError, match="with a user or password") as error:
        parse_endpoint("https://me:s3cret@h:1")

    assert "s3cret" not in error.value.message


def test_the_ca_file_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CA_VARIABLE, str(tmp_path / "nope.pem"))
    with pytest.raises(InvalidRequestError, match=r"nope\.pem does not exist on this machine"):
        parse_endpoint("https://h:1").tls_context()


def test_certificates_are_checked_unless_the_very_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_certificates(tmp_path, host="DNS:h")
    by_machine = parse_endpoint("https://h:1").tls_context()
    by_file = parse_endpoint(f"https://h:1#ca={made.ca}").tls_context()
    # Its own CA file must not be needed.
    monkeypatch.setenv(CA_VARIABLE, str(tmp_path / "nope.pem"))
    by_fingerprint = parse_endpoint("https://h:1#sha256=ab").tls_context()

    for context in (by_machine, by_file):
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
        assert not context.hostname_checks_common_name
    assert len(by_file.get_ca_certs()) == 1
    assert (by_fingerprint.verify_mode, by_fingerprint.check_hostname) == (ssl.CERT_NONE, False)
    for context in (by_machine, by_file, by_fingerprint):
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
