"""Endpoints: a URL, and what vouches for its certificate."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from streamhouse.client.http.endpoint import (
    CA_VARIABLE,
    FAILOVER_S_DEFAULT,
    Endpoint,
    parse_endpoints,
    with_ca_file,
)
from streamhouse.core.errors import InvalidRequestError
from tests.support.certificates import make_certificates


def _parse(text: str) -> Endpoint:
    [endpoint] = parse_endpoints(text).listed
    return endpoint


def test_what_an_endpoint_says() -> None:
    assert _parse("http://h:1/") == Endpoint(url="http://h:1")
    assert _parse("https://h:1#sha256=ab") == Endpoint(url="https://h:1", fingerprint="ab")
    assert _parse("https://h:1/#ca=/a%20b.pem") == Endpoint(url="https://h:1", ca_file="/a b.pem")


@pytest.mark.parametrize(
    "text", ["http://a:1", "https://a:1/x", "https://a:1#ca=/c%20%26d.pem", "https://a:1#sha256=ab"]
)
def test_an_endpoint_is_read_as_it_is_written(text: str) -> None:
    assert _parse(text).text == text


def test_a_ca_file_travels_with_the_endpoint() -> None:
    endpoint = with_ca_file("https://h:1#ca=/old.pem", "/etc/a b#&=.pem")

    assert _parse(endpoint) == Endpoint(url="https://h:1", ca_file="/etc/a b#&=.pem")


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
        _parse(text)


def test_a_password_in_an_endpoint_is_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidRequestError, match="with a user or password") as error:
        _parse("https://me:s3cret@h:1")

    assert "s3cret" not in error.value.message


def test_the_ca_file_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CA_VARIABLE, str(tmp_path / "nope.pem"))
    with pytest.raises(InvalidRequestError, match=r"nope\.pem does not exist on this machine"):
        _parse("https://h:1").tls_context()


def test_certificates_are_checked_unless_the_very_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_certificates(tmp_path, host="DNS:h")
    by_machine = _parse("https://h:1").tls_context()
    by_file = _parse(f"https://h:1#ca={made.ca}").tls_context()
    # Its own CA file must not be needed.
    monkeypatch.setenv(CA_VARIABLE, str(tmp_path / "nope.pem"))
    by_fingerprint = _parse("https://h:1#sha256=ab").tls_context()

    for context in (by_machine, by_file):
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
        assert not context.hostname_checks_common_name
    assert len(by_file.get_ca_certs()) == 1
    assert (by_fingerprint.verify_mode, by_fingerprint.check_hostname) == (ssl.CERT_NONE, False)
    for context in (by_machine, by_file, by_fingerprint):
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_several_endpoints_are_one_service_each_with_its_own_certificate() -> None:
    found = parse_endpoints("https://a:1#sha256=ab, https://b:2/x/#ca=/c.pem&failover_s=1.5")

    assert found.listed == (
        Endpoint(url="https://a:1", fingerprint="ab"),
        Endpoint(url="https://b:2/x", ca_file="/c.pem"),
    )
    assert found.failover_s == 1.5
    assert parse_endpoints("http://a,http://b").failover_s == FAILOVER_S_DEFAULT
    assert found.at("https://b:2/x").ca_file == "/c.pem"
    assert found.at("https://c:3") == Endpoint(url="https://c:3", fingerprint="ab")


def test_a_ca_file_vouches_for_all_of_several_endpoints() -> None:
    endpoint = with_ca_file("https://a:1#failover_s=7,https://b:2#sha256=ab", "/c,d.pem")
    found = parse_endpoints(endpoint)

    assert [e.ca_file for e in found.listed] == ["/c,d.pem", "/c,d.pem"]
    assert [e.fingerprint for e in found.listed] == [None, None]
    assert found.failover_s == 7
    with pytest.raises(InvalidRequestError, match="not 'http://b:2'"):
        with_ca_file("https://a:1,http://b:2", "/ca.pem")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("http://a,b:1", "endpoint 'b:1' is not a URL like"),
        ("http://a,", "endpoint '' is not a URL like"),
        ("http://a,https://b", "http://a, https://b must be all http or all https"),
        ("http://a:1,http://b:1,http://A:1/", "have a:1 twice; name each once"),
        ("http://a:80,http://a", "have a:80 twice"),
        ("http://a#failover_s=1,http://b#failover_s=2", "more than one failover_s"),
        ("http://a#failover_s=soon", "a number of seconds up to 86400, not 'soon'"),
        ("http://a#failover_s=-1", "not '-1'"),
        ("http://a#failover_s=nan", "not 'nan'"),
    ],
)
def test_a_wrong_list_of_endpoints_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        parse_endpoints(text)

    assert says in error.value.message


@pytest.mark.parametrize(
    ("told", "followed"),
    [
        ("https://b:2/", "https://b:2"),
        ("https://B:2", "https://b:2"),
        ("https://c", "https://c"),
        ("https://[::1]:5", "https://[::1]:5"),
        *((text, None) for text in (None, "", "http://b:2", "ftp://c", "https://", "//c", "c:1")),
        *((text, None) for text in ("https://me:pw@c", "https://c#ca=/x", "https://c?a=b")),
        *((text, None) for text in ("https://c:0", "https://c:99999", "https://c d", "https://[")),
        *((text, None) for text in ("https://c\r\nX: y", "https://c,https://d", "https://\u00e9")),
        ("https://" + "c" * 300, None),
    ],
)
def test_what_a_service_tells_is_followed_only_where_the_token_may_go(
    told: str | None, followed: str | None
) -> None:
    assert parse_endpoints("https://a:1,https://b:2").resolve(told) == followed


def test_a_service_without_tls_may_lead_to_one_with_it() -> None:
    assert parse_endpoints("http://a:1").resolve("https://a:2") == "https://a:2"
