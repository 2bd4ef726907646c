"""What changes a data directory goes through its `Filesystem`, or is named here with the reason."""

from __future__ import annotations

import ast
from typing import Final

from tests.architecture.source_files import SourceFile, source_files

ROOMS: Final = (
    "storage_service/directory/",
    "storage_service/engine/",
    "storage_service/ownership/journal/",
    "storage_service/log/",
    "storage_service/operations/",
)

# What changes files by itself, and why. An entry that does not fails a test.
BESIDE: Final[dict[str, str]] = {
    "storage_service/engine/backup.py": "backups are put together in backup.staged/",
    "storage_service/directory/data_directory.py": "makes the directory itself, and LOCK",
    "storage_service/engine/keys/key_bucket.py": "the mark of damaged rows lies among them",
    "storage_service/engine/keys/key_recovery.py": "moves directories of RocksDB",
    "storage_service/engine/transactions/_transaction_decision.py": "asks how full the disk is",
    "storage_service/ownership/journal/checkpoints/_checkpoint.py": "links rows by key aside",
    "storage_service/ownership/journal/store/_file_store.py": "keeps objects, not a data directory",
    "storage_service/ownership/journal/_followed_directory.py": "follows the journal of others",
    "storage_service/ownership/journal/restore/_local_copy.py": "reads, and changes nothing",
    "storage_service/ownership/journal/restore/_local_tree.py": "reads, and changes nothing",
    "storage_service/ownership/journal/restore/_restore.py": "makes what the journal has already",
    "storage_service/ownership/journal/restore/_start.py": "writes journal.json, itself outside",
    "storage_service/log/filesystem.py": "is the filesystem",
    "storage_service/log/log_copy.py": "copies a log into a backup",
    "storage_service/operations/backup_files.py": "writes backups, and copies them back",
    "storage_service/operations/check_directory.py": "opens LOCK, and changes nothing",
    "storage_service/operations/_check_keys.py": "copies rows by key aside, to look at the copy",
    "storage_service/operations/_check_log.py": "changes nothing",
    "storage_service/operations/_check_transactions.py": "changes nothing",
}

_OF_PATHS: Final = {
    "chmod",
    "hardlink_to",
    "mkdir",
    "rename",
    "rmdir",
    "symlink_to",
    "touch",
    "unlink",
    "write_bytes",
    "write_text",
}
_OF_OS: Final = {
    "chmod",
    "fdatasync",
    "fsync",
    "ftruncate",
    "link",
    "makedirs",
    "mkdir",
    "open",
    "pwrite",
    "pwritev",
    "remove",
    "removedirs",
    "rename",
    "renames",
    "replace",
    "rmdir",
    "symlink",
    "truncate",
    "unlink",
    "write",
}


def _changes_files(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    owner, _, name = called.rpartition(".")
    if owner == "os":
        return name in _OF_OS
    if owner == "shutil" or called == "LocalFilesystem":
        return True
    if owner.endswith(("filesystem", "self._inner")):
        return False
    if name == "open" and (not owner or not isinstance(node.func, ast.Attribute)):
        return True
    if name == "open":
        # `path.open("rb")` reads; other classes of ours have an `open`, too.
        modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        return any(set(str(mode)) & set("wax+") for mode in modes)
    # Of a path it takes one argument; a string's takes two.
    is_replaced = name == "replace" and bool(owner) and len(node.args) == 1 and not node.keywords
    return (bool(owner) and name in _OF_PATHS) or is_replaced


def _found() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for file in _files():
        for node in file.nodes:
            if _changes_files(node):
                assert isinstance(node, ast.Call)
                found.setdefault(str(file), []).append(f"{file}:{node.lineno}")
    return found


def _files() -> list[SourceFile]:
    return [file for file in source_files() if str(file).startswith(ROOMS)]


def test_files_are_changed_through_the_directorys_filesystem() -> None:
    found = _found()

    wrong = [place for file, places in found.items() if file not in BESIDE for place in places]
    assert not wrong, "use DataDirectory.filesystem, or say here why not: " + ", ".join(wrong)


def test_no_reason_is_left_over() -> None:
    assert set(BESIDE) <= set(_found()), "an entry of BESIDE is no longer needed"
