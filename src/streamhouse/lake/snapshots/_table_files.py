"""The files named by a table's metadata: checked on arrival, collected for a drop.

Guarantees:
- a commit adds no metadata with a file outside the table's location, in any list, manifest or
  statistics; each manifest is read once for this check
- a table is registered only from a metadata file in the table's own location, below the warehouse
  and outside of other tables; a refusal reveals nothing of the file, nor whether the file exists
- `own_files` may be deleted with a table: no file outside the table's location, no file of a nested
  table, no foreign file of the metadata
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from pyiceberg.catalog import Catalog
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.manifest import ManifestFile, read_manifest_list
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Snapshot

from streamhouse.core.errors import (
    CorruptDataError,
    ForbiddenError,
    InvalidRequestError,
    StreamhouseError,
)
from streamhouse.core.model.lake.facts import LAKE_PATHS_PROPERTY
from streamhouse.lake._policy import (
    Bounds,
    Place,
    check_lake_name,
    check_properties,
    location_of,
)
from streamhouse.lake.catalogs.guarded_catalog import GuardedCatalog, guard_of
from streamhouse.lake.files._bounded_io import bind
from streamhouse.lake.snapshots._manifests import entries_of, manifests_of

__all__ = [
    "OwnFiles",
    "check_alone",
    "check_new_files",
    "check_registration",
    "check_taken_over",
    "delete_files",
    "own_files",
]

_logger = logging.getLogger(__name__)

Identifier = tuple[str, ...]
_METADATA_FILE: Final = re.compile(r".+\.metadata\.json(\.gz)?|.+\.gz\.metadata\.json")
_MANIFESTS_REMEMBERED_MAX: Final = 50_000


class _Checked:
    """Manifests whose files were looked at, by table and path. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __contains__(self, key: tuple[str, str]) -> bool:
        with self._lock:
            return key in self._keys

    def add(self, key: tuple[str, str]) -> None:
        with self._lock:
            self._keys[key] = None
            while len(self._keys) > _MANIFESTS_REMEMBERED_MAX:
                self._keys.popitem(last=False)


_checked: Final = _Checked()


class _Check:
    """One look at what metadata names. `catalog` says where the table's files may lie."""

    def __init__(self, name: str, metadata: TableMetadata, bounds: Bounds, io: FileIO) -> None:
        self._where = f"lake table '{name}'"
        self._uuid = str(metadata.table_uuid)
        self._metadata = metadata
        self._bounds = bounds
        self._io = io
        self._folders: dict[Place, bool] = {}

    def path(self, path: str) -> None:
        """Refuse a path that is not the table's."""
        self._bounds.check(self._where, path)
        if not self._bounds.really_has(path, folders=self._folders):
            raise ForbiddenError(
                f"{self._where}: file '{path[:500]}' leads out of the table's location by a"
                " symbolic link"
            )

    def snapshots(self, snapshots: list[Snapshot], *, known: set[str]) -> None:
        """Refuse snapshots that name a file outside; the manifests `known` were looked at."""
        for snapshot in snapshots:
            self.path(snapshot.manifest_list)
            for manifest in self._manifests(snapshot):
                path = manifest.manifest_path
                if path not in known:
                    self._manifest(manifest)
                    known.add(path)

    def statistics(self, base: TableMetadata | None) -> None:
        """Refuse outside statistics files missing in `base`."""
        base_paths = set() if base is None else set(_statistics_of(base))
        for path in _statistics_of(self._metadata):
            if path not in base_paths:
                self.path(path)

    def metadata_log(self) -> None:
        """Refuse former metadata files outside."""
        for entry in self._metadata.metadata_log:
            self.path(entry.metadata_file)

    def _manifest(self, manifest: ManifestFile) -> None:
        path = manifest.manifest_path
        self.path(path)
        key = (self._uuid, path)
        if key in _checked:
            return
        for file in self._files(manifest):
            self.path(file)
        _checked.add(key)

    def _manifests(self, snapshot: Snapshot) -> list[ManifestFile]:
        with _unreadable(f"{self._where}: manifest list '{snapshot.manifest_list[:500]}'"):
            return manifests_of(self._io, snapshot)

    def _files(self, manifest: ManifestFile) -> list[str]:
        with _unreadable(f"{self._where}: manifest '{manifest.manifest_path[:500]}'"):
            entries = entries_of(self._io, manifest)
            return [entry.data_file.file_path for entry in entries]


class _unreadable:
    """Raises any refusal of a file as `InvalidRequestError`, without text of the file."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_ours = isinstance(error, StreamhouseError) and not isinstance(error, CorruptDataError)
        if isinstance(error, Exception) and not is_ours:
            raise InvalidRequestError(f"{self._what} cannot be read") from None


def _statistics_of(metadata: TableMetadata) -> Iterator[str]:
    for file in (*metadata.statistics, *metadata.partition_statistics):
        yield file.statistics_path


def check_new_files(
    name: str, base: TableMetadata | None, new: TableMetadata, *, catalog: Catalog, io: FileIO
) -> None:
    """Refuse a commit that would make foreign files the table's.

    `base` None: a new table. Raises `ForbiddenError`, or `InvalidRequestError` for an unreadable
    manifest.
    """
    bounds = guard_of(catalog).bounds(new.location)
    check = _Check(name, new, bounds, io)
    base_snapshots = (
        set() if base is None else {(s.snapshot_id, s.manifest_list) for s in base.snapshots}
    )
    added = [s for s in new.snapshots if (s.snapshot_id, s.manifest_list) not in base_snapshots]
    check.statistics(base)
    if base is None:
        check.metadata_log()
    if not added:
        return
    head = None if base is None else base.snapshot_by_name(MAIN_BRANCH)
    known_paths = set() if head is None else {m.manifest_path for m in check._manifests(head)}
    check.snapshots(added, known=known_paths)


def check_registration(
    catalog: Catalog, identifier: Identifier, metadata_location: str
) -> TableMetadata:
    """Return the metadata of a file for the registration of its table.

    Raises `ForbiddenError` for a place forbidden to tables of this catalog, with or without a file,
    and `InvalidRequestError` for a missing file or a file without a table's metadata.
    """
    guard = guard_of(catalog)
    for part in identifier[:-1]:
        check_lake_name(part, what="namespace")
    check_lake_name(identifier[-1])
    where = f"lake table '{'.'.join(identifier)}'"
    folder = _registered_folder(guard, where, identifier, metadata_location)
    no_table = (
        f"{where}: there is no metadata of a table that can be read at '{metadata_location[:500]}'"
    )
    try:
        io = load_file_io(dict(catalog.properties), metadata_location)
        metadata = FromInputFile.table_metadata(io.new_input(metadata_location))
        location = location_of(metadata.location, guard.rules.warehouse, is_new=True)
    except Exception:  # noqa: BLE001 - whatever is wrong with the file, nothing of it is told
        raise InvalidRequestError(no_table) from None
    if location != folder:
        raise InvalidRequestError(no_table)
    check_properties(where, metadata.properties)
    bounds = guard.bounds(metadata.location)
    name = ".".join(identifier)
    bind(io, name, bounds, own=bounds, metadata_location=metadata_location)
    check = _Check(name, metadata, bounds, io)
    check.path(metadata_location)
    check.metadata_log()
    check.statistics(None)
    check.snapshots(list(metadata.snapshots), known=set())
    return metadata


def _registered_folder(
    catalog: GuardedCatalog, where: str, identifier: Identifier, metadata_location: str
) -> Place:
    """Return the folder of the table with this metadata file; raises `ForbiddenError`."""
    try:
        file = location_of(metadata_location, catalog.rules.warehouse, is_new=True)
    except ForbiddenError as error:
        raise ForbiddenError(f"{where}: metadata-location: {error.message}") from None
    folder = file.parent.parent
    is_metadata = file.parent.segments[-1:] == ("metadata",)
    if (
        not is_metadata
        or not _METADATA_FILE.fullmatch(file.segments[-1])
        or not catalog.is_in_roots(identifier, folder)
    ):
        raise ForbiddenError(
            f"{where}: metadata-location must be a file LOCATION/metadata/NAME.metadata.json below"
            " the warehouse"
        )
    catalog.check_outside_data_directory(where, folder)
    if any(folder.may_overlap(taken_place) for taken_place in catalog.other_places(())):
        raise ForbiddenError(
            f"{where}: metadata-location lies where another lake table is; two tables must not"
            " share files"
        )
    return folder


def check_taken_over(catalog: Catalog, table: Table) -> None:
    """Refuse to take over a table with a forbidden location, or with foreign files.

    The service will write to the table, expire its snapshots and purge it. Files are those of the
    current snapshot.
    """
    guard = guard_of(catalog)
    metadata = table.metadata
    name = ".".join(table.name())
    where = f"lake table '{name}'"
    place = location_of(metadata.location, guard.rules.warehouse, is_new=False)
    if not guard.is_in_roots(table.name(), place):
        raise ForbiddenError(
            f"{where} does not lie below the warehouse but at '{metadata.location[:300]}'; the"
            f" operator can name the place in --catalog-property {LAKE_PATHS_PROPERTY}=..., or"
            " import the table as another one, which copies the rows"
        )
    guard.check_outside_data_directory(where, place)
    if any(place.may_overlap(taken_place) for taken_place in guard.other_places(table.name())):
        raise ForbiddenError(f"{where} lies in or around another lake table")
    check = _Check(name, metadata, guard.bounds(metadata.location), table.io)
    check.metadata_log()
    check.statistics(None)
    head = metadata.snapshot_by_name(MAIN_BRANCH)
    check.snapshots([] if head is None else [head], known=set())


def check_alone(table: Table) -> None:
    """Refuse a search for orphans in a folder with possible files of other tables."""
    guard = guard_of(table.catalog)
    where = f"lake table '{'.'.join(table.name())}'"
    hint = "files that nobody needs are not looked for there"
    location = table.metadata.location
    place = location_of(location, guard.rules.warehouse, is_new=False)
    if guard.rules.roots and not guard.is_in_roots(table.name(), place):
        raise ForbiddenError(
            f"{where} does not lie below the warehouse but at '{location[:300]}': {hint}, unless"
            f" the operator names the place in --catalog-property {LAKE_PATHS_PROPERTY}=..."
        )
    # A REST catalog would have to be asked table by table.
    places = guard.other_places(table.name()) if guard.knows_places else []
    if any(place.may_overlap(foreign_place) for foreign_place in places):
        raise ForbiddenError(f"{where} lies in or around another lake table: {hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFiles:
    """The files to delete with a table, in order, and the number of files to keep."""

    paths: tuple[str, ...]
    foreign_count: int
    first_foreign: str


def own_files(catalog: Catalog, table: Table) -> OwnFiles:
    """Return the files that go with a table; raises `ForbiddenError` if none may.

    Unreadable lists and manifests name no files.
    """
    guard = guard_of(catalog)
    metadata = table.metadata
    where = f"lake table '{'.'.join(table.name())}'"
    hint = "drop it without purgeRequested, and delete its files yourself"
    try:
        place = location_of(metadata.location, guard.rules.warehouse, is_new=False)
    except ForbiddenError as error:
        raise ForbiddenError(f"{where}: location: {error.message}; {hint}") from None
    if not guard.is_in_roots(table.name(), place):
        raise ForbiddenError(
            f"{where} does not lie below the warehouse but at '{metadata.location[:300]}'; {hint}"
        )
    if metadata.properties.get("gc.enabled", "true").lower() == "false":
        raise ForbiddenError(
            f"{where} has property gc.enabled = false, because its files are also another table's;"
            f" {hint}"
        )
    guard.check_outside_data_directory(where, place)
    foreign_places = [
        foreign_place
        for foreign_place in guard.other_places(table.name())
        if place.may_overlap(foreign_place)
    ]
    if any(foreign_place.contains(place) for foreign_place in foreign_places):
        raise ForbiddenError(f"{where} lies inside another lake table; {hint}")
    return _sorted_out(table, guard.own_bounds(metadata.location), foreign_places)


def delete_files(io: FileIO, paths: Iterable[str]) -> None:
    """Delete the files of a dropped table; a warning has the reason for each remaining file."""
    for path in paths:
        try:
            io.delete(path)
        except FileNotFoundError:
            pass
        except Exception as error:  # noqa: BLE001 - the others go all the same
            _logger.warning("event=purged_file_stays file=%r why=%r", path[:500], str(error))


def _sorted_out(table: Table, bounds: Bounds, others: list[Place]) -> OwnFiles:
    folders: dict[Place, bool] = {}
    own_paths: dict[str, None] = {}
    foreign: dict[str, None] = {}
    for path in _named_files(table, bounds):
        is_own = bounds.really_has(path, folders=folders)
        if is_own and others:
            is_own = not any(foreign_place.contains(bounds.place(path)) for foreign_place in others)
        (own_paths if is_own else foreign)[path] = None
    return OwnFiles(
        paths=tuple(own_paths), foreign_count=len(foreign), first_foreign=next(iter(foreign), "")
    )


def _named_files(table: Table, bounds: Bounds) -> Iterator[str]:
    """Yield every file that the metadata names: data first, the current metadata file last."""
    metadata = table.metadata
    manifests: dict[str, ManifestFile] = {}
    for snapshot in metadata.snapshots:
        if bounds.has(snapshot.manifest_list):
            try:
                manifest_files = list(
                    read_manifest_list(table.io.new_input(snapshot.manifest_list))
                )
            except Exception as error:  # noqa: BLE001 - a table that is damaged can be purged too
                _logger.warning(
                    "event=purge_cannot_read file=%r why=%r", str(snapshot), str(type(error))
                )
                continue
            manifests.update((manifest.manifest_path, manifest) for manifest in manifest_files)
    for path, manifest in manifests.items():
        if bounds.has(path):
            try:
                entries = manifest.fetch_manifest_entry(table.io, discard_deleted=False)
            except Exception as error:  # noqa: BLE001 - a table that is damaged can be purged too
                _logger.warning("event=purge_cannot_read file=%r why=%r", path, str(type(error)))
                continue
            yield from (entry.data_file.file_path for entry in entries)
    yield from manifests
    yield from (snapshot.manifest_list for snapshot in metadata.snapshots)
    yield from _statistics_of(metadata)
    yield from (entry.metadata_file for entry in metadata.metadata_log)
    yield table.metadata_location
