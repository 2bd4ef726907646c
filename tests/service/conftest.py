"""One service for the tests of a file, and a client that finds it without tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("service")) as process:
        yield process


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[StorageClient]:
    with StorageClient(service.endpoint) as opened:
        for path in opened.list_tables():
            opened.drop_table(path)
        yield opened
