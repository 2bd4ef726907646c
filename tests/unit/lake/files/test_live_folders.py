"""The life of the folders of live cuts is in their names: nothing else is ever touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.live_folders import (
    READABLE_S,
    LiveFolders,
    SweptFolders,
    delete_expired,
    is_in_live_folder,
)
from tests.support.object_store import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, ObjectStore

FILES = LakeFilesystem({})
NOTHING = SweptFolders(0, 0, 0)
MADE_S = 1_800_000_000
ID = "0123456789abcdef0123456789abcdef"


def _location(folder: Path) -> str:
    return f"file://{folder}"


def _touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_folder_goes_when_nobody_may_read_it_any_more(tmp_path: Path) -> None:
    folders = LiveFolders(_location(tmp_path), made_s=MADE_S + 0.9)
    for folder in (folders.data, folders.metadata):
        _touch(Path(folder.removeprefix("file://")), "a.parquet")

    readable = delete_expired(FILES, _location(tmp_path), now_s=MADE_S + READABLE_S)
    expired = delete_expired(FILES, _location(tmp_path), now_s=MADE_S + READABLE_S + 1)

    assert (readable, expired) == (SweptFolders(0, 2, 2), SweptFolders(2, 0, 0))
    assert not list(tmp_path.glob("*/live/*"))


@pytest.mark.parametrize(
    "name",
    [
        f"data/live/{MADE_S}-{ID[:-1]}/a.parquet",
        f"data/live/{MADE_S}-{ID.upper()}/a.parquet",
        f"data/live/x{MADE_S}-{ID}/a.parquet",
        f"data/live/-{MADE_S}-{ID}/a.parquet",
        f"data/live/{MADE_S}-{ID}.bak/a.parquet",
        f"data/live/{MADE_S}-{ID}",
        f"data/{MADE_S}-{ID}/a.parquet",
        f"data/live/keep/{MADE_S}-{ID}/a.parquet",
        f"other/live/{MADE_S}-{ID}/a.parquet",
        f"live/{MADE_S}-{ID}/a.parquet",
        f"data/live/{MADE_S * 10}-{ID}/a.parquet",
    ],
)
def test_everything_else_is_left_alone(tmp_path: Path, name: str) -> None:
    _touch(tmp_path, name)

    swept = delete_expired(FILES, _location(tmp_path), now_s=MADE_S + 10 * READABLE_S)

    assert not swept.deleted_count
    assert _files(tmp_path) == {name}


def test_an_empty_folder_of_a_killed_build_goes_as_well(tmp_path: Path) -> None:
    (tmp_path / "data" / "live" / f"{MADE_S}-{ID}").mkdir(parents=True)

    swept = delete_expired(FILES, _location(tmp_path), now_s=MADE_S + READABLE_S + 1)

    assert swept == SweptFolders(1, 0, 0)
    assert not list(tmp_path.glob("data/live/*"))


def test_a_location_without_any_is_fine(tmp_path: Path) -> None:
    assert delete_expired(FILES, _location(tmp_path / "none"), now_s=MADE_S) == NOTHING


def test_a_file_is_known_to_be_in_a_live_folder() -> None:
    location = "s3://lake/db/t"

    assert is_in_live_folder(location, f"{location}/data/live/{MADE_S}-{ID}/a.parquet")
    assert is_in_live_folder(f"{location}/", f"{location}/metadata/live/{MADE_S}-{ID}/a.avro")
    assert not is_in_live_folder(location, f"{location}/data/round-000001-abc/a.parquet")
    assert not is_in_live_folder(location, f"{location}/data/live/a.parquet")


def test_a_link_to_a_folder_is_left_alone(tmp_path: Path) -> None:
    _touch(tmp_path / "elsewhere", "a.parquet")
    (tmp_path / "data" / "live").mkdir(parents=True)
    (tmp_path / "data" / "live" / f"{MADE_S}-{ID}").symlink_to(tmp_path / "elsewhere")

    assert delete_expired(FILES, _location(tmp_path), now_s=MADE_S + READABLE_S + 1) == NOTHING
    assert _files(tmp_path / "elsewhere") == {"a.parquet"}


@pytest.mark.slow
def test_nothing_is_left_of_a_folder_in_an_object_store() -> None:
    with ObjectStore() as store:
        files = LakeFilesystem(
            {
                "s3.endpoint": store.endpoint,
                "s3.access-key-id": ACCESS_KEY,
                "s3.secret-access-key": SECRET_KEY,
                "s3.region": REGION,
            }
        )
        location = f"s3://{BUCKET}/db/t"
        folders = LiveFolders(location, made_s=MADE_S)
        for folder in (folders.data, folders.metadata):
            with files.open_output(f"{folder}/a.parquet") as sink:
                sink.write(b"x")

        readable = delete_expired(files, location, now_s=MADE_S + READABLE_S)
        expired = delete_expired(files, location, now_s=MADE_S + READABLE_S + 1)

        assert (readable, expired) == (SweptFolders(0, 2, 2), SweptFolders(2, 0, 0))
        assert files.list_subfolders(f"{location}/data/live") == []
