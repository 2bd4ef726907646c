"""What `streamhouse tier --once` loads: each library more is time before the first row."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from streamhouse.cli import main
try:
    main()
finally:
    print("loaded", sorted({"pandas", "pyarrow.dataset", "pyspark"} & set(sys.modules)))
"""


def test_a_round_of_new_rows_loads_no_pandas(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("log", "id BIGINT, place STRING", partitioned_by=["place"])
        client.create_table("keys", "id BIGINT, place STRING", primary_key=["id"])
        for number in range(2):
            rows = [{"id": 2 * number, "place": "here"}, {"id": 2 * number + 1, "place": "there"}]
            client.append("log", rows)
            client.upsert("keys", rows)
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM, "tier", "--once", "--endpoint", service.endpoint],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.stdout.splitlines()[-1] == "loaded []", done.stdout + done.stderr
        assert client.read("log").num_rows == client.read("keys").num_rows == 4
