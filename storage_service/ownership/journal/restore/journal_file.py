"""`journal.json`: a data directory's knowledge of its journal.

The file is written before an epoch is taken, with the nonce for opening the epoch, and again after
the restore. So an interrupted start still recognises the last process as this directory's own.

Each nonce has the place of its process (`DataDirectory.place`). Holding the lock in the same place
proves the process dead; a copy of the directory proves nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from crc32c import crc32c

from streamhouse.core.errors import CorruptDataError, InvalidRequestError
from streamhouse.storage_service.log.filesystem import Filesystem, replace_durably

__all__ = ["JOURNAL_FILE", "JournalFile", "Phase", "refuse_half_made", "refuse_without_journal"]

JOURNAL_FILE: Final = "journal.json"
_FORMAT: Final = 1
_NONCE: Final = re.compile(r"[0-9a-f]{32}")
# After more unsuccessful starts in a row, the oldest count as foreign.
_NONCES_MAX: Final = 64


class Phase:
    """The progress of the directory."""

    READY = "ready"
    """Restored; only the directory's own process has changed files since."""
    RESTORING = "restoring"
    """A restore is running: files are trusted only after comparing checksums."""
    UPLOADING = "uploading"
    """The first checkpoint is not stored yet: the journal lacks the directory's files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFile:
    """`epoch` is the last epoch owned by this directory, without gaps since it served.

    `nonces` opened this epoch, or later ones; `places` are the places of their processes.
    """

    service_id: str
    shard: str
    epoch: int
    nonces: tuple[str, ...]
    places: tuple[str, ...]
    phase: str

    def __post_init__(self) -> None:
        phases = (Phase.READY, Phase.RESTORING, Phase.UPLOADING)
        is_known = self.phase in phases and all(map(_NONCE.fullmatch, self.nonces))
        is_known &= len(self.places) == len(self.nonces)
        is_known &= all(isinstance(place, str) for place in self.places)
        if not is_known or self.epoch < 0 or not self.shard:
            raise CorruptDataError(f"invalid content of {JOURNAL_FILE}: {self!r:.300}")

    def with_nonce(self, nonce: bytes, place: str) -> JournalFile:
        """Return a copy with a further process about to take an epoch for this directory."""
        opened = {**dict(zip(self.nonces, self.places, strict=True)), nonce.hex(): place}
        return self._with(list(opened.items())[-_NONCES_MAX:])

    def with_last_nonce(self) -> JournalFile:
        """Return a copy with only the last noted process."""
        return replace(self, nonces=self.nonces[-1:], places=self.places[-1:])

    def of_nobody(self) -> JournalFile:
        """Return a copy without processes: every byte of the disk is also in the journal."""
        return self._with([])

    def _with(self, opened: Sequence[tuple[str, str]]) -> JournalFile:
        nonces, places = (tuple(epoch[index] for epoch in opened) for index in range(2))
        return replace(self, nonces=nonces, places=places)

    def was_opened_at(self, nonce: str, place: str) -> bool:
        """Whether the process with a nonce is known to have run in this place."""
        return bool(place) and (nonce, place) in zip(self.nonces, self.places, strict=True)

    @staticmethod
    def load(directory: Path) -> JournalFile | None:
        """Return the directory's file; None for a directory without a journal."""
        path = directory / JOURNAL_FILE
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            sealed = json.loads(data)
            content: dict[str, Any] = sealed["content"]
            if sealed["crc32c"] != crc32c(_text(content)) or content.pop("format") != _FORMAT:
                raise CorruptDataError("its checksum or format is another")
            listed = {name: tuple(content[name]) for name in ("nonces", "places")}
            return JournalFile(**{**content, **listed})
        except (
            CorruptDataError,
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
        ) as error:
            raise CorruptDataError(
                f"{path} is damaged ({error}); remove the data directory's contents to have them"
                " made again from the journal"
            ) from error

    def save(self, directory: Path, filesystem: Filesystem) -> None:
        """Write the directory's file, durably."""
        content = {name: getattr(self, name) for name in self.__slots__} | {"format": _FORMAT}
        sealed = {"content": content, "crc32c": crc32c(_text(content))}
        replace_durably(filesystem, directory / JOURNAL_FILE, [json.dumps(sealed).encode()])
        filesystem.sync_directory(directory)


def refuse_without_journal(directory: Path) -> None:
    """Raise `InvalidRequestError` if a directory, or shards in it, have a journal."""
    refuse_half_made(directory)
    if (directory / JOURNAL_FILE).exists():
        raise InvalidRequestError(
            f"{directory} has a journal, which has to know of every change: use --journal. To go on"
            f" without it, for good, remove {directory / JOURNAL_FILE}"
        )
    below = next(directory.glob(f"shards/*/{JOURNAL_FILE}"), None)
    if below is not None and not (directory / "service.json").exists():
        raise InvalidRequestError(
            f"{directory} has no service of its own, but shards of one, as {below.parent}: use"
            " --shards and --journal as before, or another --data-dir"
        )


def refuse_half_made(directory: Path) -> None:
    """Raise `InvalidRequestError` for a directory in the middle of a restore."""
    file = JournalFile.load(directory)
    if file is not None and file.phase == Phase.RESTORING:
        raise InvalidRequestError(
            f"{directory} is not what its journal says yet: its restore was interrupted, or a"
            " standby used it. Start the service on it with its --journal first, or use the"
            " directory of the service that owns the journal; the journal itself is looked at by"
            " 'streamhouse check --journal'"
        )


def _text(content: object) -> bytes:
    return json.dumps(content, sort_keys=True).encode()
