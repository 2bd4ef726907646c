"""The store's keys: journal, leases, checkpoints, packs and directory.

```
shards/<shard>/journal/<epoch:08d>/<seq:012d>
shards/<shard>/lease/<epoch:08d>
shards/<shard>/checkpoints/<epoch:08d>-<seq:012d>
shards/<shard>/packs/<name>
directory/...
```

Keys are parsed strictly: a name of another form counts as foreign and is ignored.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Final

from streamhouse.core.errors import InvalidNameError

__all__ = ["DEFAULT_SHARD", "DIRECTORY", "EPOCH_MAX", "SEQ_MAX", "SHARDS", "Place", "ShardNames"]

_logger = logging.getLogger(__name__)

DEFAULT_SHARD: Final = "0"
DIRECTORY: Final = "directory/"
"""The prefix of all keys of the shard directory."""
SHARDS: Final = "shards/"
"""The prefix of all shards' keys; the shard's name follows."""
EPOCH_MAX: Final = 10**8 - 1
SEQ_MAX: Final = 10**12 - 1
_SHARD: Final = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62})")
_PACK: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,126})")
_JOURNAL: Final = re.compile(r"([0-9]{8})/([0-9]{12})")
_LEASE: Final = re.compile(r"[0-9]{8}")
_CHECKPOINT: Final = re.compile(r"([0-9]{8})-([0-9]{12})")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A place of the journal: the position of one object."""

    epoch: int
    seq: int

    def __post_init__(self) -> None:
        if not (0 <= self.epoch <= EPOCH_MAX and 0 <= self.seq <= SEQ_MAX):
            raise ValueError(f"not a place of a journal: {self.epoch}, {self.seq}")

    def __str__(self) -> str:
        return f"{self.epoch:08d}-{self.seq:012d}"

    @property
    def following(self) -> Place:
        """The next place of the same epoch."""
        return Place(self.epoch, self.seq + 1)


@dataclass(frozen=True, slots=True)
class ShardNames:
    """The keys of one shard."""

    shard: str = DEFAULT_SHARD

    def __post_init__(self) -> None:
        if not _SHARD.fullmatch(self.shard):
            raise InvalidNameError(
                f"shard '{self.shard}' must be of a-z, 0-9, _ and -, begin with a letter or digit,"
                " and have at most 63 characters"
            )

    @property
    def journal(self) -> str:
        """The folder of all epochs."""
        return f"{SHARDS}{self.shard}/journal/"

    @property
    def leases(self) -> str:
        """The folder of leases."""
        return f"{SHARDS}{self.shard}/lease/"

    @property
    def checkpoints(self) -> str:
        """The folder of manifests."""
        return f"{SHARDS}{self.shard}/checkpoints/"

    @property
    def packs(self) -> str:
        """The folder of packs."""
        return f"{SHARDS}{self.shard}/packs/"

    def epoch(self, epoch: int) -> str:
        """The folder of one epoch's objects."""
        return f"{self.journal}{epoch:08d}/"

    def object(self, place: Place) -> str:
        """The journal's object at a place."""
        return f"{self.epoch(place.epoch)}{place.seq:012d}"

    def lease(self, epoch: int) -> str:
        """The lease of an epoch's owner."""
        return f"{self.leases}{epoch:08d}"

    def checkpoint(self, place: Place) -> str:
        """The manifest of every file at a place, after all objects before."""
        return f"{self.checkpoints}{place}"

    def pack(self, name: str) -> str:
        """The key of a pack."""
        if not _PACK.fullmatch(name):
            raise InvalidNameError(f"no pack can be called '{name:.200}'")
        return f"{self.packs}{name}"

    def place_of_object(self, key: str) -> Place | None:
        """Return the place in a journal object's key, or None for a foreign name."""
        return self._place(_JOURNAL.fullmatch(self._below(self.journal, key)), key)

    def place_of_checkpoint(self, key: str) -> Place | None:
        """Return the place in a manifest's key, or None for a foreign name."""
        return self._place(_CHECKPOINT.fullmatch(self._below(self.checkpoints, key)), key)

    def epoch_of_lease(self, key: str) -> int | None:
        """Return the epoch in a lease's key, or None for a foreign name."""
        match = _LEASE.fullmatch(self._below(self.leases, key))
        if match is None:
            _say_foreign(key)
            return None
        return int(match[0])

    def name_of_pack(self, key: str) -> str | None:
        """Return the name in a pack's key, or None for a foreign name."""
        match = _PACK.fullmatch(self._below(self.packs, key))
        if match is None:
            _say_foreign(key)
            return None
        return match[0]

    @staticmethod
    def _below(folder: str, key: str) -> str:
        return key.removeprefix(folder) if key.startswith(folder) else ""

    @staticmethod
    def _place(match: re.Match[str] | None, key: str) -> Place | None:
        if match is None:
            _say_foreign(key)
            return None
        return Place(int(match[1]), int(match[2]))


def _say_foreign(key: str) -> None:
    _logger.warning("event=foreign_object key=%.200r advice='no name of a journal: ignored'", key)
