"""A REST catalog that does not answer is given up, and is told through whom a request came."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.rest import RestCatalog
from requests import ConnectTimeout, PreparedRequest, ReadTimeout, Response
from requests.adapters import BaseAdapter

from streamhouse.core.errors import UnavailableError, UnknownOutcomeError
from streamhouse.core.model.lake.facts import (
    CATALOG_TIMEOUT_PROPERTY,
    LakeCatalog,
    is_rest_catalog,
)
from streamhouse.lake.catalogs._sql_catalog import open_catalog
from streamhouse.lake.catalogs.open_catalog import OpenCatalog
from streamhouse.lake.catalogs.rest_catalog import (
    LakeRestCatalog,
    passed_through,
    with_rest_catalog,
)
from streamhouse.lake.iceberg_errors import catalog_errors
from tests.support.held_step import around
from tests.support.silent_server import SilentServer

CONFIG = {"/iceberg/v1/config": {"defaults": {}, "overrides": {}}}


@pytest.fixture
def silent() -> Iterator[SilentServer]:
    with SilentServer(CONFIG) as server:
        yield server


def _described(server: SilentServer, **more: str) -> LakeCatalog:
    properties = {"type": "rest", "uri": f"{server.endpoint}/iceberg"}
    return LakeCatalog(
        name="lake", properties={**properties, CATALOG_TIMEOUT_PROPERTY: "200", **more}
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda catalog: catalog.list_namespaces(),
        lambda catalog: catalog.load_table("db.t"),
        lambda catalog: catalog.drop_table("db.t"),
        lambda catalog: catalog.create_namespace("db"),
    ],
    ids=["list", "load", "drop", "create"],
)
def test_no_call_waits_for_ever(silent: SilentServer, call: Any) -> None:
    catalog = open_catalog(_described(silent))

    said = r"the catalog at 127\.0\.0\.1:\d+ did not answer within 0\.2 s \(catalog_timeout_ms\)"
    with pytest.raises(ReadTimeout, match=said):
        call(catalog)
    assert len(silent.requests) == 2


def test_opening_does_not_either() -> None:
    with SilentServer() as silent:
        with pytest.raises(ReadTimeout, match="did not answer"):
            open_catalog(_described(silent))
        # As a reader opens it.
        with pytest.raises(ReadTimeout, match="did not answer"):
            load_catalog("lake", **with_rest_catalog(_described(silent).properties))


@pytest.mark.parametrize("said_as", ["defaults", "overrides"])
def test_a_server_chooses_no_code_and_shows_all_snapshots(tmp_path: Path, said_as: str) -> None:
    proof = tmp_path / "proof"
    hostile = {
        "auth": {
            "type": "custom",
            "impl": "subprocess.check_call",
            "custom": {"args": ["touch", str(proof)]},
        },
        "py-io-impl": "no.such.Module",
        "snapshot-loading-mode": "refs",
        "prefix": "of-the-server",
    }
    config = {"defaults": {}, "overrides": {}, said_as: hostile}
    with SilentServer({"/iceberg/v1/config": config}) as server:
        # As workers and the service open it, and as a reader does.
        described = _described(server)
        opened = [
            open_catalog(described),
            load_catalog("lake", **with_rest_catalog(described.properties)),
        ]
        for catalog in opened:
            assert {k for k in hostile if k in catalog.properties} == {"prefix"}
    assert not proof.exists()


@pytest.mark.filterwarnings("ignore:Deprecated:DeprecationWarning")
def test_asking_for_a_token_does_not_either(silent: SilentServer) -> None:
    with pytest.raises(ReadTimeout, match="did not answer"):
        open_catalog(_described(silent, credential="me:secret"))
    assert [request for request, _ in silent.requests] == ["POST /iceberg/v1/oauth/tokens"]


def test_who_waits_for_the_catalog_to_be_opened_does_not_wait_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened, go_on = threading.Event(), threading.Event()
    attempts = []

    def fail(*_: object, **__: object) -> Catalog:
        attempts.append(1)
        opened.set()
        go_on.wait()
        raise ReadTimeout("nobody there")

    around(monkeypatch, "catalog-opening", fail)
    catalog = OpenCatalog(LakeCatalog(name="lake", properties={}), service_id="a")
    errors: list[str] = []

    def ask() -> None:
        try:
            catalog.get()
        except UnavailableError as error:
            errors.append(error.message)

    threads = [threading.Thread(target=ask) for _ in range(5)]
    threads[0].start()
    opened.wait()
    # The others count the attempts before they wait; the first is under way.
    waiting = _Counted(catalog._lock, 4)
    catalog._lock = waiting  # type: ignore[assignment]  # has what is used of a lock
    for thread in threads[1:]:
        thread.start()
    waiting.all_there.wait()
    go_on.set()
    for thread in threads:
        thread.join()

    assert errors == ["cannot open catalog 'lake': ReadTimeout: nobody there"] * 5
    assert len(attempts) == 1
    # The next one tries anew.
    with pytest.raises(UnavailableError):
        catalog.get()
    assert len(attempts) == 2


class _Counted:
    """A lock that tells when so many are at it."""

    def __init__(self, lock: Any, count: int) -> None:
        self._lock, self._left = lock, count
        self._counting = threading.Lock()
        self.all_there = threading.Event()

    def __enter__(self) -> None:
        with self._counting:
            self._left -= 1
            if not self._left:
                self.all_there.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _Failing(BaseAdapter):
    """Raises instead of sending; `timeouts` are those it was given."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.timeouts: list[Any] = []

    def send(self, request: PreparedRequest, **more: Any) -> Response:
        self.timeouts.append(more["timeout"])
        raise self.error

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (ConnectTimeout(), UnavailableError, r"took no connection within 10 s"),
        (ReadTimeout(), UnknownOutcomeError, r"did not answer within 60 s"),
    ],
)
def test_a_commit_that_was_sent_may_have_landed(
    silent: SilentServer, error: Exception, raised: type[Exception], said: str
) -> None:
    catalog = open_catalog(_described(silent, **{CATALOG_TIMEOUT_PROPERTY: "60000"}))
    assert isinstance(catalog, LakeRestCatalog)
    failing = _Failing(error)
    # As an adapter that signs requests is mounted: nearer than all there are.
    catalog._session.mount(silent.endpoint, failing)
    catalog._watch(catalog._session)

    with pytest.raises(raised, match=said), catalog_errors("commit", is_commit=True):
        catalog._session.post(f"{silent.endpoint}/iceberg/v1/transactions/commit")

    assert failing.timeouts == [(10.0, 60.0)]


def test_a_request_names_the_services_it_came_through(silent: SilentServer) -> None:
    opened = OpenCatalog(_described(silent), service_id="c")
    with passed_through(("a", "b")):
        catalog = opened.get()
        with pytest.raises(ReadTimeout):
            catalog.list_namespaces()
    with pytest.raises(ReadTimeout):
        catalog.list_namespaces()

    via = [headers["x-streamhouse-via"] for _, headers in silent.requests]
    assert via == ["a,b,c", "a,b,c", "c"]


@pytest.mark.parametrize(
    ("properties", "is_rest"),
    [
        ({"type": "rest", "uri": "http://x"}, True),
        ({"type": "REST", "uri": "http://x"}, True),
        ({"uri": "https://x/iceberg"}, True),
        ({"uri": "sqlite:///x"}, False),
        ({"type": "hive", "uri": "http://x"}, False),
        ({"py-catalog-impl": "some.Catalog", "uri": "http://x"}, False),
        ({}, False),
    ],
)
def test_only_rest_catalogs_are_opened_as_one(properties: dict[str, str], is_rest: bool) -> None:
    assert is_rest_catalog(properties) == is_rest
    assert (with_rest_catalog(properties) != properties) == is_rest
    assert issubclass(LakeRestCatalog, RestCatalog)
