"""Services with a journal, each on a machine of its own: a data directory that can be lost.

`JournalHome` is what outlives machines: the store of the journal, and the lake with its catalog.
`Machine` is a data directory, a port and the process there is now. `Pair` is two of them over one
home, of which one owns the shard and the other stands by.
"""

from __future__ import annotations

import contextlib
import http.client
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from tests.support.faulty_store import FaultyStore
from tests.support.free_ports import free_port
from tests.support.object_store import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, ObjectStore
from tests.support.service_process import DiedAtStart, ServiceProcess

__all__ = ["JournalHome", "Machine", "Pair", "StoreKind"]

StoreKind = Literal["file", "s3", "faulty s3"]
_LOOK_EVERY_S: Final = 0.02
_ASK_TIMEOUT_S: Final = 1.0


class JournalHome:
    """The store of one journal, and a lake beside it; entering starts what there is to start.

    `arguments` and `env` are for `streamhouse serve`. `faulty` is the store that misbehaves. A
    `folder` that was given is kept, with the data directories of the machines in it.
    """

    def __init__(self, kind: StoreKind, *, seed: int = 0, folder: Path | None = None) -> None:
        self.kind = kind
        self._given = folder
        self._seed = seed
        self._stack = contextlib.ExitStack()
        self.folder = Path()
        self.env: dict[str, str] = {}
        self.url = ""
        self.faulty: FaultyStore | None = None
        self.store: ObjectStore | None = None

    def __enter__(self) -> JournalHome:
        if self._given is None:
            folder = tempfile.TemporaryDirectory(prefix="streamhouse-home-")
            self.folder = Path(self._stack.enter_context(folder))
        else:
            self.folder = self._given
        (self.folder / "lake").mkdir(parents=True)
        try:
            self._open_store()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _open_store(self) -> None:
        if self.kind == "file":
            self.url = f"file://{self.folder / 'journal'}"
            return
        store = self.store = self._stack.enter_context(ObjectStore())
        endpoint = store.endpoint
        if self.kind == "faulty s3":
            self.faulty = self._stack.enter_context(FaultyStore(store.port, seed=self._seed))
            endpoint = self.faulty.endpoint
        # One store may have the journals of several runs.
        self.url = f"s3://{BUCKET}/journal-{secrets.token_hex(4)}"
        self.env = {
            **store.environment(),
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def sibling(self, name: str) -> JournalHome:
        """Return a home in the same store, with a journal and a lake of its own."""
        other = JournalHome(self.kind)
        other.folder = self.folder / name
        (other.folder / "lake").mkdir(parents=True)
        other.env, other.faulty, other.store = self.env, self.faulty, self.store
        other.url = f"{self.url}-{name}"
        return other

    @property
    def properties(self) -> dict[str, str]:
        """What opens the store in this process."""
        if self.store is None:
            return {}
        return {
            "s3.endpoint": self.env["AWS_ENDPOINT_URL"],
            "s3.access-key-id": ACCESS_KEY,
            "s3.secret-access-key": SECRET_KEY,
            "s3.region": REGION,
        }

    @property
    def arguments(self) -> tuple[str, ...]:
        """Where journal and lake are."""
        warehouse = f"file://{self.folder / 'lake' / 'warehouse'}"
        return "--journal", self.url, *self.catalog_arguments, "--warehouse", warehouse

    @property
    def catalog_arguments(self) -> tuple[str, ...]:
        """Where the lake's catalog is."""
        return (
            *("--catalog-property", "type=sql"),
            *("--catalog-property", f"uri=sqlite:///{self.folder / 'lake' / 'catalog.db'}"),
        )


class Machine:
    """A data directory and an address; `process` is the service on it, None while it is off."""

    def __init__(self, home: JournalHome, name: str, *arguments: str) -> None:
        self.home = home
        self.name = name
        self.data_dir = home.folder / name
        self.port = free_port()
        self.process: ServiceProcess | None = None
        self._arguments = arguments

    @property
    def endpoint(self) -> str:
        """The URL of its service."""
        return f"http://127.0.0.1:{self.port}"

    def start(
        self,
        *arguments: str,
        command: Sequence[str] | None = None,
        start_timeout_s: float = 180.0,
        is_executed: bool = False,
    ) -> ServiceProcess:
        """Start the service, and wait until it listens; it may not own the shard yet."""
        assert self.process is None, f"{self.name} runs"
        given = ("--port", str(self.port), *self.home.arguments, *self._arguments, *arguments)
        more = {} if command is None else {"command": command}
        process = ServiceProcess(
            self.data_dir,
            *given,
            env=self.home.env,
            start_timeout_s=start_timeout_s,
            is_executed=is_executed,
            **more,  # type: ignore[arg-type]
        )
        process.__enter__()
        self.process = process
        return process

    def kill(self) -> None:
        """Kill -9, if it runs; the directory is left as it is."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.__exit__(None, None, None)

    def lose(self) -> None:
        """Kill -9, and take the disk away."""
        self.kill()
        shutil.rmtree(self.data_dir, ignore_errors=True)

    def end(self) -> None:
        """Stop it cleanly, if it runs."""
        process, self.process = self.process, None
        if process is not None:
            process.__exit__(None, None, None)

    def wait_until_owner(self, timeout_s: float) -> None:
        """Wait until it owns the shard; raises `DiedAtStart` if it ends before."""
        deadline_s = time.monotonic() + timeout_s
        pause = threading.Event()
        while not self.is_owner():
            if self.process is None or self.process.has_ended():
                raise DiedAtStart(f"{self.name} has ended: {self.log_text()[-3_000:]}")
            if time.monotonic() > deadline_s:
                raise AssertionError(
                    f"{self.name} does not own the shard after {timeout_s} s:"
                    f" {self.log_text()[-3_000:]}"
                )
            pause.wait(_LOOK_EVERY_S)

    def log_text(self) -> str:
        """What the process there is has logged."""
        return "" if self.process is None else self.process.log_text()

    def answers(self, *routes: str) -> int:
        """Return how many requests of these routes it has answered with rows."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        return sum(
            int(float(line.rpartition(" ")[2]))
            for line in text.splitlines()
            if line.startswith("streamhouse_requests_total{")
            and 'status="200"' in line
            and any(f'route="{route}"' in line for route in routes)
        )

    def is_owner(self) -> bool:
        """Whether it says that it answers about the data."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ASK_TIMEOUT_S)
        try:
            connection.request("GET", "/ready")
            with connection.getresponse() as answer:
                answer.read()
                return answer.status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class Pair:
    """Two machines of one shard; `endpoint` names both, for clients."""

    def __init__(self, home: JournalHome, *arguments: str) -> None:
        self.machines = [Machine(home, name, *arguments) for name in ("one", "two")]

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            machine.kill()

    @property
    def endpoint(self) -> str:
        """Both, as STREAMHOUSE_ENDPOINT takes them."""
        return ",".join(machine.endpoint for machine in self.machines)

    def other(self, machine: Machine) -> Machine:
        """Return the one that is not this."""
        (other,) = (one for one in self.machines if one is not machine)
        return other

    def owner(self, timeout_s: float) -> Machine:
        """Wait until one of them owns the shard, and return it."""
        deadline_s = time.monotonic() + timeout_s
        pause = threading.Event()
        while True:
            for machine in self.machines:
                if machine.process is not None and machine.is_owner():
                    return machine
            assert time.monotonic() < deadline_s, self.describe("nobody owns the shard")
            pause.wait(_LOOK_EVERY_S)

    def describe(self, what: str) -> str:
        """Return a message with the ends of both logs."""
        logs = (f"{m.name} ({m.endpoint}):\n{m.log_text()[-4_000:]}" for m in self.machines)
        return "\n".join([what, *logs])
