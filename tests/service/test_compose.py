"""deploy/docker/compose.yaml without containers: the same commands, variables and store.

Names of hosts and folders of the containers become ports and folders of this machine; all else is
as the file and the image have it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
import yaml

from streamhouse.api.client import StreamhouseClient
from tests.support.command_line import streamhouse
from tests.support.free_ports import free_port
from tests.support.object_store import ObjectStore
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

DOCKER: Final = Path(__file__).parents[2] / "deploy" / "docker"
SERVICES: Final[dict[str, Any]] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
IMAGE: Final = dict(
    re.findall(r"^ +(?:ENV )?(STREAMHOUSE_\w+)=(\S+)", (DOCKER / "Dockerfile").read_text(), re.M)
)
ROWS: Final = pa.table({"id": pa.array(range(1_000), pa.int64())})


class _Machine:
    """This machine in the place of the containers."""

    def __init__(self, folder: Path, store: ObjectStore) -> None:
        (folder / "catalog").mkdir()
        self.token = folder / "token"
        self.token.write_text("compose-token\n")
        self.token.chmod(0o600)
        self.ports = {name: free_port() for name in ("one", "two")}
        self.here = {
            "http://store:8333": store.endpoint,
            "/catalog/": f"{folder}/catalog/",
            "/run/secrets/streamhouse_token": str(self.token),
            # Nothing of a test listens beyond loopback.
            "0.0.0.0": "127.0.0.1",
            **{f"http://{name}:8765": self.url(name) for name in self.ports},
        }
        self.keys = store.environment()
        self.folder = folder

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def environment(self, name: str) -> Mapping[str, str]:
        given = {**IMAGE, **SERVICES[name]["environment"]}
        for there, here in self.here.items():
            given = {variable: text.replace(there, here) for variable, text in given.items()}
        return {**given, **self.keys}

    def start(self, name: str) -> ServiceProcess:
        assert SERVICES[name]["command"] == ["serve"]
        return ServiceProcess(
            self.folder / name,
            *("--port", str(self.ports[name]), "--standby"),
            env=self.environment(name),
        )


def test_what_compose_starts_serves_takes_over_and_tiers(tmp_path: Path) -> None:
    with ObjectStore() as store:
        machine = _Machine(tmp_path, store)
        endpoints = ",".join(map(machine.url, ("one", "two")))
        with (
            machine.start("one") as one,
            StreamhouseClient(endpoints, token="compose-token") as client,
        ):
            one.wait_ready()
            client.create_table("t", ROWS.schema)
            client.append("t", ROWS)
            with machine.start("two") as two:
                assert one.terminate() == 0
                two.wait_ready()
                client.append("t", ROWS)
                assert SERVICES["worker"]["command"] == ["tier"]
                worker = streamhouse("tier", "--once", env=machine.environment("worker"))
                state = client.table_state("t")
                lines = two.log_text().splitlines()

        assert "default.t" in worker.stdout
        assert {p.tiered_offset for p in state.positions.values()} == {2_000}
        assert store.keys("warehouse")
        assert store.keys("streamhouse")
        # --log-format json is the image's.
        assert "taken" in {json.loads(line)["event"] for line in lines}


def test_the_image_reads_a_token_that_its_variables_name() -> None:
    assert IMAGE["STREAMHOUSE_SERVE_TOKEN_FILE"].startswith("/run/secrets/")
    assert SERVICES["one"]["secrets"] == ["streamhouse_token"]
