"""The file IO of committing catalogs: our access to files, the library's stock errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyiceberg.io import PY_IO_IMPL, load_file_io

from streamhouse.core.errors import UnsupportedError
from streamhouse.lake.catalogs._lake_io import LakeIO, with_file_io


def _io(folder: Path) -> LakeIO:
    io = load_file_io(with_file_io({"warehouse": f"file://{folder}"}, LakeIO))
    assert isinstance(io, LakeIO)
    return io


def test_a_file_is_created_once_and_read(tmp_path: Path) -> None:
    io, uri = _io(tmp_path), f"file://{tmp_path}/new/a.json"

    with io.new_output(uri).create() as stream:
        stream.write(b"one")
    with pytest.raises(FileExistsError, match=r"a\.json' is there already"):
        io.new_output(uri).create()
    with io.new_output(uri).create(overwrite=True) as stream:
        stream.write(b"other")

    file = io.new_output(uri).to_input_file()
    assert (file.exists(), len(file), file.open().read()) == (True, 5, b"other")
    io.delete(file)
    io.delete(uri)
    assert not io.new_input(uri).exists()


def test_what_the_disk_says_is_raised(tmp_path: Path) -> None:
    io, uri = _io(tmp_path), f"file://{tmp_path}/gone.json"

    with pytest.raises(FileNotFoundError):
        io.new_input(uri).open()
    with pytest.raises(FileNotFoundError):
        len(io.new_input(uri))
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        io.new_output(f"file://{tmp_path}/file/a.json").create(overwrite=True)
    with pytest.raises(IsADirectoryError):
        io.delete(f"file://{tmp_path}")
    with pytest.raises(UnsupportedError, match="scheme 'gs'"):
        io.new_input("gs://bucket/a.json").open()


@pytest.mark.parametrize(
    "properties",
    [{"warehouse": "gs://bucket"}, {}, {"warehouse": "file:///w", PY_IO_IMPL: "a.Module"}],
)
def test_other_stores_and_named_modules_keep_theirs(properties: dict[str, str]) -> None:
    assert with_file_io(properties, LakeIO) == properties
