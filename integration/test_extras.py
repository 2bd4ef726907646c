"""Each extra alone, with the newest packages that it allows: all that it is for works, and what
needs another extra says which.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from integration.installed_wheel import ROOT, run, wheel
from streamhouse.api.client import StreamhouseClient
from streamhouse.core.extras import EXTRAS
from tests.support.dependencies import asked_by_extra
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

__all__ = ["wheel"]

pytestmark = [pytest.mark.slow, pytest.mark.judge, pytest.mark.spark, pytest.mark.timeout(1_500)]

# Those of users; `all` is tried in test_light_install.py.
USED = (*EXTRAS, "connect")


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """A service with rows in log and lake."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
    rows = pa.table({"id": [1, 2, 3], "name": ["a", "b", "c"]}, schema=schema)
    with ServiceProcess(tmp_path / "service") as service:
        with StreamhouseClient(service.endpoint) as client:
            for name in ("tiered", "plain"):
                client.create_table(name, schema)
            client.create_table("keyed", schema, primary_key=["id"])
            client.append("tiered", rows)
            client.upsert("keyed", rows)
            tier_once(client)
            client.append("tiered", pa.table({"id": [0, 4], "name": ["a", "b"]}, schema=schema))
        yield service.endpoint


def _has(extra: str, other: str) -> bool:
    """Whether who installs `extra` has all packages of `other`."""
    if not other:
        return True
    packages = {requirement.name for requirement in asked_by_extra(extra)}
    return {requirement.name for requirement in asked_by_extra(other)} <= packages


@pytest.mark.parametrize("extra", USED)
def test_an_extra_has_what_its_calls_need(
    extra: str, wheel: Path, endpoint: str, tmp_path: Path
) -> None:
    environment, folder = tmp_path / "environment", tmp_path / "folder"
    folder.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    python = str(environment / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, f"pyspark-streamhouse[{extra}] @ {wheel.as_uri()}", timeout_s=900)

    program = str(ROOT / "integration" / "extra_calls_program.py")
    printed = run(python, program, endpoint, str(folder), extra, timeout_s=900)

    calls = [line.split("|") for line in printed.splitlines() if line.count("|") == 2]
    assert len(calls) >= 25
    for name, needed, said in calls:
        if _has(extra, needed):
            assert said == "ok", f"{name}: {said}"
        else:
            assert "pip install 'pyspark-streamhouse[" in said, f"{name}: {said}"
            lacking = said.rpartition("[")[2].partition("]")[0]
            assert lacking == needed or _has(needed, lacking), f"{name}: {said}"
