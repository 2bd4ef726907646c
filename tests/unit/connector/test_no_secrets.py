"""The token is in nothing that people look at: reprs, errors, logs."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from streamhouse.client import StorageClient
from streamhouse.core.errors import StreamhouseError
from streamhouse.reading.options import options
from streamhouse.reading.options.connection import connection_options
from streamhouse.reading.options.options import BATCH, read_options
from streamhouse.reading.scan import scan
from streamhouse.reading.tail import lake_task
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.tiering.round import _round as tiering_round
from streamhouse.tiering.worker import _service as tiering_service
from streamhouse.tiering.worker import job

SECRET = "s3cret-t0ken"


def test_options_do_not_show_the_token() -> None:
    given = {"table": "db.t", "token": SECRET}

    assert connection_options(given).token == SECRET
    assert SECRET not in repr(connection_options(given))
    assert SECRET not in repr(read_options(given, use=BATCH))


@pytest.mark.parametrize("wrong", [{"tokn": SECRET}, {"token": SECRET, "maxSplitBytes": "x"}])
def test_errors_about_options_do_not_show_the_token(wrong: dict[str, str]) -> None:
    with pytest.raises(StreamhouseError) as error:
        read_options({"table": "db.t", **wrong}, use=BATCH)

    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    "module",
    [options, scan, job, lake_task, tiering_round, tiering_service],
    ids=lambda m: m.__name__,
)
def test_no_value_with_a_token_shows_it(module: object) -> None:
    """Also what ships to executors: Spark may log a task's arguments."""
    for name, value in vars(module).items():
        if not (isinstance(value, type) and is_dataclass(value)):
            continue
        shown = [field.name for field in fields(value) if field.name == "token" and field.repr]
        assert not shown or "__repr__" in vars(value), f"{name} shows its token"


def test_the_service_and_its_client_do_not_show_the_token(tmp_path: Path) -> None:
    config = ServiceConfig(
        data_dir=tmp_path,
        token=SECRET,
        tls_key_password=SECRET,
        catalog_properties={"s3.secret-access-key": SECRET},
    )

    assert SECRET not in repr(config)
    assert SECRET not in repr(config.lake_catalog())
    with StorageClient("http://127.0.0.1:1", token=SECRET) as client:
        assert SECRET not in repr(client)
        with pytest.raises(StreamhouseError) as error:
            client.list_databases()
        assert SECRET not in str(error.value)
