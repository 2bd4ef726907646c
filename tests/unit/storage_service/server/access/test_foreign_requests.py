"""Requests that a browser sends for a page of somebody else are refused; programs' are not."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path

import pytest

from streamhouse.core.errors import ForbiddenError, InvalidRequestError
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.server.access.access import ForeignRequests
from tests.support.in_process_service import in_process_service

HERE = "127.0.0.1:8765"


def _check(method: str = "GET", *, config: ServiceConfig | None = None, **headers: str) -> None:
    found = ForeignRequests(config or ServiceConfig(data_dir=Path("unused")))
    pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    # Twice: what was right once is remembered.
    for _ in range(2):
        found.check(method, [(b"accept", b"*/*"), *pairs])


@pytest.mark.parametrize(
    "host",
    [
        HERE, "127.0.0.1", "localhost", "LocalHost:80", "localhost.:8765", "[::1]:8765", "[::1]",
        "10.0.0.7:8765", "[fe80::1]:1", socket.gethostname(), f"{socket.gethostname()}:8765",
    ],
)  # fmt: skip
def test_own_names_are_known(host: str) -> None:
    _check(host=host)
    _check("POST", host=host, origin=f"http://{host}")
    _check("POST", host=host, origin=f"https://{host}", sec_fetch_site="same-origin")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil.example",
        "2130706433", "0x7f.1", "", ":8765", "127.0.0.1@evil.example", "evil.example/127.0.0.1",
        "[::1].evil", "[evil.example]:1", "localhost:8765:1", "\xe9vil", "a b",
    ],
)  # fmt: skip
def test_every_other_name_is_refused_with_the_option_that_allows_it(host: str) -> None:
    with pytest.raises(ForbiddenError, match="--allowed-host"):
        _check(host=host)


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example", "null", "", "http://127.0.0.1:3000", "http://127.0.0.1",
        "http://localhost:8765", "file://", "http://[::1", "http://127.0.0.1:8765.evil.example",
        "http://127.0.0.1:8765/x", "evil", f"x{HERE}", "chrome-extension://abcdef",
    ],
)  # fmt: skip
def test_a_page_of_another_host_or_port_is_refused(origin: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        with pytest.raises(ForbiddenError, match="from a web page of '"):
            _check(method, host=HERE, origin=origin)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_a_page_embeds_is_refused_and_a_link_may_be_followed(site: str) -> None:
    """An image or script of another page has no `Origin`; neither has a link to the status page."""
    for mode in ("no-cors", "cors", "websocket"):
        with pytest.raises(ForbiddenError, match="another site"):
            _check(host=HERE, sec_fetch_site=site, sec_fetch_mode=mode)
    with pytest.raises(ForbiddenError, match="another site"):
        _check("POST", host=HERE, sec_fetch_site=site, sec_fetch_mode="navigate")
    _check(host=HERE, sec_fetch_site=site, sec_fetch_mode="navigate")
    _check(host=HERE, sec_fetch_site="same-origin", sec_fetch_mode="cors")
    _check(host=HERE, sec_fetch_site="none", sec_fetch_mode="navigate")


def test_named_hosts_are_own_names_and_may_have_pages_of_their_own(tmp_path: Path) -> None:
    config = ServiceConfig(data_dir=tmp_path, allowed_hosts=("Lake.Internal",))
    _check(config=config, host="lake.internal:80")
    # A proxy that gives the request another `Host`.
    _check("POST", config=config, host=HERE, origin="https://lake.internal")
    with pytest.raises(ForbiddenError):
        _check(config=config, host="other.internal")
    with pytest.raises(ForbiddenError):
        _check(config=config, host="lake.internal", origin="https://other.internal")


def test_any_host_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="lets every web page use a service"):
        ServiceConfig(data_dir=tmp_path, allowed_hosts=("*",))
    config = ServiceConfig(data_dir=tmp_path, token="t", allowed_hosts=("*",))
    _check(config=config, host="any.example", origin="http://other.example")


@pytest.mark.parametrize("name", ["http://lake", "lake:8765", "", "*.lake", "a b"])
def test_what_is_no_host_name_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="must be a host name"):
        ServiceConfig(data_dir=tmp_path, allowed_hosts=(name,))


async def test_every_way_into_the_service_is_guarded_but_health(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also the way of a GET that is answered as soon as its head is read, and `/iceberg`."""
    evil = {"host": "evil.example", "origin": "http://evil.example"}

    async def scenario() -> None:
        async with in_process_service(tmp_path) as service:
            await service.create_table(primary_key=["id"])
            for headers in (evil, {**evil, "host": HERE}, {"host": evil["host"]}):
                for method, path in (
                    ("GET", "/"),
                    ("GET", "/v1/tables"),
                    ("POST", "/v1/databases"),
                    ("GET", "/v1/tables/events/rows/1"),
                    ("POST", "/iceberg/v1/namespaces"),
                ):
                    answer = await service.call(method, path, headers=headers, body=b"")
                    assert answer.status == 403, (method, path)
                    assert "--allowed-host" in json.dumps(answer.json())
                    assert "access-control-allow-origin" not in answer.headers
                assert (await service.call("GET", "/health", headers=headers)).status == 200
            assert (await service.call("GET", "/", headers={"host": HERE})).status == 200

    with caplog.at_level(logging.WARNING):
        await scenario()
    assert (
        "event=refused code=forbidden client=test token_name=- method=GET path='/'" in caplog.text
    )
