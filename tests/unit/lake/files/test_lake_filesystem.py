"""Lake files by URI: local ones as they are named, S3 as the catalog's properties say."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from streamhouse.core.errors import (
    StorageFailedError,
    UnavailableError,
    UnsupportedError,
)
from streamhouse.lake.files.lake_filesystem import (
    LakeFilesystem,
    lake_file_properties,
    s3_arguments,
)

FILES = LakeFilesystem({})


def _write(uri: str, data: bytes, files: LakeFilesystem = FILES) -> None:
    with files.open_output(uri) as sink:
        sink.write(data)


def _read(uri: str, files: LakeFilesystem = FILES) -> bytes:
    with files.open_input(uri) as source:
        return bytes(source.read())


@pytest.mark.parametrize("form", ["file://{}", "file:{}", "file://localhost{}", "{}"])
@pytest.mark.parametrize("name", ["plain", "with space", "percent%20", "a=b", "umläut", "q?x#y"])
def test_a_local_file_is_found_by_every_form_of_its_name(
    tmp_path: Path, form: str, name: str
) -> None:
    uri = form.format(tmp_path / "deep" / name)

    _write(uri, b"rows")

    assert (tmp_path / "deep" / name).read_bytes() == b"rows"
    assert _read(uri) == b"rows"
    assert FILES.size(uri) == 4


def test_folders_are_listed_and_deleted(tmp_path: Path) -> None:
    folder = f"file://{tmp_path}/round"
    for name in ("b", "a"):
        _write(f"{folder}/{name}", b"x")

    assert FILES.list_folder(folder) == [f"{folder}/a", f"{folder}/b"]
    assert FILES.list_folder(f"{folder}/") == [f"{folder}/a", f"{folder}/b"]
    FILES.delete_folder(folder)
    assert not (tmp_path / "round").exists()
    assert FILES.list_folder(folder) == []
    FILES.delete_folder(folder)


def test_deleting_what_is_not_there_is_fine(tmp_path: Path) -> None:
    FILES.delete(f"file://{tmp_path}/nothing")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageFailedError, match=r"cannot read lake file '.*/gone': it is missing"):
        FILES.open_input(f"file://{tmp_path}/gone")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    with pytest.raises(StorageFailedError, match="cannot write lake file"):
        FILES.open_output(f"file://{tmp_path}/file/x")


def test_an_unknown_scheme_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="scheme 'hdfs' is not supported; use file or s3"):
        FILES.open_input("hdfs://node/x")


def test_s3_properties_become_arguments_and_s3_wins_over_client() -> None:
    assert s3_arguments(
        {
            "s3.endpoint": "http://127.0.0.1:9000",
            "client.access-key-id": "shared",
            "s3.access-key-id": "own",
            "s3.secret-access-key": "secret",
            "client.region": "eu-central-1",
            "s3.request-timeout": "2.5",
            "s3.force-virtual-addressing": "true",
            "s3.unknown-to-us": "x",
        }
    ) == {
        "endpoint_override": "http://127.0.0.1:9000",
        "access_key": "own",
        "secret_key": "secret",
        "region": "eu-central-1",
        "request_timeout": 2.5,
        "force_virtual_addressing": True,
    }


def test_only_properties_of_files_are_kept_and_never_shown() -> None:
    properties = {"uri": "sqlite:///x", "token": "t0ken", "s3.secret-access-key": "s3cr3t"}

    files = LakeFilesystem(properties)

    assert lake_file_properties(properties) == {"s3.secret-access-key": "s3cr3t"}
    assert "s3cr3t" not in repr(files)
    copy = pickle.loads(pickle.dumps(files))
    assert copy._properties == {"s3.secret-access-key": "s3cr3t"}


class _FakeS3:
    """An S3 client over a local folder: `bucket/key` is a path in it."""

    def __init__(self, root: Path) -> None:
        self._inner = fs.SubTreeFileSystem(str(root), fs.LocalFileSystem())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("scheme", ["s3", "s3a", "s3n"])
def test_object_stores_are_addressed_by_bucket_and_key(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "lake" / "t").mkdir(parents=True)
    files = LakeFilesystem({})
    files._s3 = _FakeS3(tmp_path)
    uri = f"{scheme}://lake/t/x.parquet"

    _write(uri, b"rows", files)

    assert (tmp_path / "lake" / "t" / "x.parquet").read_bytes() == b"rows"
    assert _read(uri, files) == b"rows"
    assert files.size(uri) == 4
    assert files.list_folder(f"{scheme}://lake/t") == [uri]
    assert files.list_folder(f"{scheme}://lake/none") == []
    files.delete_folder(f"{scheme}://lake/t")
    files.delete(uri)
    assert files.list_folder(f"{scheme}://lake/t") == []
    with pytest.raises(StorageFailedError, match="it is missing"):
        files.size(uri)


def test_an_object_store_that_fails_may_answer_later(tmp_path: Path) -> None:
    class Down:
        def open_input_file(self, key: str) -> Any:
            raise OSError("connection refused")

    files = LakeFilesystem({})
    files._s3 = Down()

    with pytest.raises(UnavailableError, match=r"cannot read lake file 's3://lake/x'"):
        files.open_input("s3://lake/x")


def test_a_file_that_is_read_in_pieces_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": range(10)}), path)

    with FILES.open_parquet(f"file://{path}") as file:
        assert file.read_row_group(0).num_rows == 10
        if (maps := Path("/proc/self/maps")).exists():
            assert str(path) not in maps.read_text()
