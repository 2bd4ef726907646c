"""Epochs: who may write the journal.

Epochs are opened in order and ended by a seal; every step is a create-if-absent. Promises, whatever
the store delays, reorders, loses or lists late (only `create` is trusted):
- an epoch ends at its first seal; objects behind the seal were never acknowledged
- epoch E + 1 is opened once, by one owner, and only after E has a seal
- a taker seals the first place without an object, and never passes an empty place

Requirements for trimming (`_trim.py`): an epoch loses objects only once a *later* epoch is open,
and keeps its open object and its seal. So trimming makes no holes in the newest epoch. A running
owner opens a new epoch (`JournalWriter.roll`) before trimming.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.ownership.journal.names import (
    EPOCH_MAX,
    SEQ_MAX,
    Place,
    ShardNames,
)
from streamhouse.storage_service.ownership.journal.object_format import (
    NONCE_BYTES,
    SEAL_BYTES_MAX,
    JournalObject,
    ObjectKind,
    checksum_of,
    decode_object,
    encode_facts,
    journal_identity,
)
from streamhouse.storage_service.ownership.journal.steps import (
    Create,
    List,
    Steps,
    get_or_none,
    stored,
)
from streamhouse.storage_service.ownership.journal.store.object_store import ObjectExistsError

__all__ = [
    "IN_FLIGHT_MAX",
    "OpenFacts",
    "Seal",
    "SealReason",
    "TakenByOtherError",
    "Tenure",
    "find_seal",
    "new_seal",
    "newest_epoch",
    "open_epoch",
    "open_facts",
    "read_open",
    "seal_epoch",
    "take",
]

IN_FLIGHT_MAX: Final = 64
"""An owner has fewer objects in flight, so fewer objects lie behind a first gap."""
_CHASES: Final = 3
_LISTED: Final = 1_000


class TakenByOtherError(Exception):
    """Another process opened the epoch. Find the owner, then try again."""


class SealReason:
    """Why an epoch ended."""

    TAKEN = "taken"
    """Another process takes over."""
    STOPPED = "stopped"
    """Its owner stopped, everything is stored: anybody may go on at once."""
    ROLLED = "rolled"
    """Its owner goes on in the next epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFacts:
    """The content of an epoch's open object. Epoch 1 follows a fictitious epoch 0."""

    service_id: str
    endpoint: str
    lease_ms: int
    previous_epoch: int
    previous_seal_seq: int

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Seal:
    """Where an epoch ends, why, and whose journal it is."""

    place: Place
    checksum: int
    reason: str
    service_id: str

    @classmethod
    def met(cls, seal_object: JournalObject, facts: OpenFacts) -> Seal:
        """Return the seal of the epoch opened with `facts`, as read from the store."""
        return cls(
            seal_object.place,
            seal_object.checksum,
            str(seal_object.facts.get("reason")),
            facts.service_id,
        )


def new_seal(
    place: Place,
    reason: str,
    *,
    facts: OpenFacts,
    journal: bytes,
    nonce: bytes,
    previous_checksum: int,
) -> tuple[Seal, list[Any]]:
    """Return a seal of the epoch opened with `facts`, and the seal's object to store."""
    buffers = encode_facts(
        ObjectKind.SEAL,
        {"reason": reason},
        place=place,
        journal=journal,
        nonce=nonce,
        previous_checksum=previous_checksum,
    )
    return Seal(place, checksum_of(buffers), reason, facts.service_id), buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenure:
    """An epoch of this process. `nonce` identifies the process and survives a roll."""

    names: ShardNames
    epoch: int
    nonce: bytes = field(repr=False)
    facts: OpenFacts
    checksum: int
    """The open object's checksum."""

    @property
    def journal(self) -> bytes:
        """The journal's identity in all its objects."""
        return journal_identity(self.facts.service_id, self.names.shard)


def open_facts(open_object: JournalObject, *, key: str) -> OpenFacts:
    """Read the facts of an open object. Raises `CorruptDataError`."""
    texts = [open_object.facts.get(name) for name in ("service_id", "endpoint")]
    numbers = [
        open_object.facts.get(name) for name in ("lease_ms", "previous_epoch", "previous_seal_seq")
    ]
    if (
        open_object.kind is not ObjectKind.OPEN
        or not all(isinstance(text, str) and len(text) <= 1_000 for text in texts)
        or not all(type(number) is int and 0 <= number <= SEQ_MAX for number in numbers)
        or open_object.facts["previous_epoch"] != open_object.place.epoch - 1
    ):
        raise CorruptDataError(f"object {key} of the journal is no valid open object")
    return OpenFacts(**{name: open_object.facts[name] for name in OpenFacts.__slots__})


def read_open(names: ShardNames, epoch: int) -> Steps[OpenFacts]:
    """Return the facts of a listed epoch's open object. Raises `CorruptDataError`."""
    opened = yield from _opened(names, epoch)
    return open_facts(opened, key=names.object(opened.place))


def newest_epoch(names: ShardNames, *, at_least: int = 0) -> Steps[int]:
    """Return the newest listed epoch, 0 without epochs; a stale list gives an older one.

    The number of lists grows with the logarithm of the epochs.
    """

    def listed_after(epoch: int) -> Steps[int]:
        key = names.object(Place(epoch, SEQ_MAX))
        while True:
            entries = yield List(names.journal, key, 1)
            if not entries:
                return 0
            place = names.place_of_object(entries[0].key)
            if place is not None:
                return place.epoch
            key = entries[0].key

    epoch = yield from _greatest(at_least, EPOCH_MAX, listed_after)
    return epoch


def seal_epoch(
    names: ShardNames, epoch: int, *, nonce: bytes, reason: str = SealReason.TAKEN
) -> Steps[Seal]:
    """Seal an epoch at its first place without an object, or find its seal.

    A seal placed further on stops an owner still writing, so the search ends. Raises
    `TakenByOtherError` if a later epoch is open.
    """
    yield from _check_newest(names, epoch)
    opened = yield from _opened(names, epoch)
    facts = open_facts(opened, key=names.object(opened.place))
    met, losses = (yield from _end(names, opened)), 0
    while met.kind is not ObjectKind.SEAL:
        place = met.place.following
        seal, buffers = new_seal(
            place,
            reason,
            facts=facts,
            journal=opened.journal,
            nonce=nonce,
            previous_checksum=met.checksum,
        )
        foreign_object = yield from stored(
            Create(names.object(place), buffers), is_same_as(buffers)
        )
        if foreign_object is None:
            return seal
        met = decode_object(
            foreign_object, key=names.object(place), place=place, journal=opened.journal
        )
        losses += 1
        if losses == _CHASES:
            yield from _bar(names, place, opened.journal, nonce)
    return Seal.met(met, facts)


def find_seal(names: ShardNames, epoch: int) -> Steps[Seal | None]:
    """Return the seal of an epoch, or None if no seal is listed."""
    opened = yield from _read(names, Place(epoch, 0), None)
    if opened is None:
        return None
    try:
        met = yield from _end(names, opened)
    except TakenByOtherError:
        # The epoch was trimmed meanwhile, so a later epoch exists.
        return None
    if met.kind is not ObjectKind.SEAL:
        return None
    return Seal.met(met, open_facts(opened, key=names.object(opened.place)))


def open_epoch(
    names: ShardNames,
    seal: Seal | None,
    *,
    nonce: bytes,
    facts: Mapping[str, Any],
) -> Steps[Tenure]:
    """Open the epoch after a sealed one, or the first. Raises `TakenByOtherError`."""
    place = Place(seal.place.epoch + 1 if seal else 1, 0)
    opening = OpenFacts(
        service_id=seal.service_id if seal else secrets.token_hex(16),
        endpoint=facts["endpoint"],
        lease_ms=facts["lease_ms"],
        previous_epoch=place.epoch - 1,
        previous_seal_seq=seal.place.seq if seal else 0,
    )
    buffers = encode_facts(
        ObjectKind.OPEN,
        opening.to_json(),
        place=place,
        journal=journal_identity(opening.service_id, names.shard),
        nonce=nonce,
        previous_checksum=seal.checksum if seal else 0,
    )
    foreign_object = yield from stored(Create(names.object(place), buffers), is_same_as(buffers))
    if foreign_object is not None:
        raise TakenByOtherError(f"epoch {place.epoch} of the journal was opened by another process")
    return Tenure(
        names=names,
        epoch=place.epoch,
        nonce=nonce,
        facts=opening,
        checksum=checksum_of(buffers),
    )


def take(
    names: ShardNames,
    *,
    after: int,
    endpoint: str,
    lease_ms: int,
    nonce: bytes | None = None,
) -> Steps[Tenure]:
    """End epoch `after` and own the next epoch; `after` is 0 for a new journal.

    This fences the owner of `after`. Raises `TakenByOtherError` if another process was faster, or
    `after` is not the newest epoch.
    """
    nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
    seal = (yield from seal_epoch(names, after, nonce=nonce)) if after else None
    facts = {"endpoint": endpoint, "lease_ms": lease_ms}
    return (yield from open_epoch(names, seal, nonce=nonce, facts=facts))


def is_same_as(buffers: list[Any]) -> Callable[[memoryview], bool]:
    """Return a predicate for objects with exactly these bytes."""
    return lambda data: data == b"".join(buffers)


def _greatest(low: int, maximum: int, next_after: Callable[[int], Steps[int]]) -> Steps[int]:
    """Return the greatest existing number from `low` on; `next_after` finds the next."""
    high, step = maximum, 1
    while low < high:
        probed = low + step - 1 if step and low + step <= high else (low + high) // 2
        following = yield from next_after(probed)
        if following:
            low, step = following, step * 2
        else:
            high, step = probed, 0
    return low


def _end(names: ShardNames, opened: JournalObject) -> Steps[JournalObject]:
    """Return the epoch's seal, or the object before its first gap, as far as listed.

    Fewer than `IN_FLIGHT_MAX` objects lie behind a gap or a seal. So a run of as many operations
    has no gap and no seal before, and reading the last places is enough.
    """
    epoch = opened.place.epoch

    def listed_after(seq: int) -> Steps[int]:
        entries = yield from _listed(names, Place(epoch, seq), 1)
        return entries[0][0].seq if entries else 0

    last, window = (yield from _greatest(0, SEQ_MAX, listed_after)), 4 * IN_FLIGHT_MAX
    while True:
        first = max(last - window, 0)
        end, seal = yield from _end_of_run(names, opened, first)
        if end - first >= IN_FLIGHT_MAX or first == 0:
            break
        window *= 4
    if seal is not None:
        return seal
    end_object = (yield from _read(names, Place(epoch, end), opened.journal)) if end else opened
    if end_object is None:
        # The object was trimmed after the list, so a later epoch must exist.
        yield from _check_newest(names, epoch)
        raise CorruptDataError(f"{names.object(Place(epoch, end))} was listed and is gone")
    return end_object


def _check_newest(names: ShardNames, epoch: int) -> Steps[None]:
    if (yield from get_or_none(names.object(Place(epoch + 1, 0)))) is not None:
        raise TakenByOtherError(f"epoch {epoch + 1} of the journal is open")


def _end_of_run(
    names: ShardNames, opened: JournalObject, first: int
) -> Steps[tuple[int, JournalObject | None]]:
    """Return the last seq without a gap after `first`, and the seal after this seq."""
    seq = first
    while True:
        page = yield from _listed(names, Place(opened.place.epoch, seq), _LISTED)
        for place, size_bytes in page:
            if place.seq != seq + 1:
                return seq, None
            if size_bytes <= SEAL_BYTES_MAX:
                journal_object = yield from _read(names, place, opened.journal)
                if journal_object is None:
                    return seq, None
                if journal_object.kind is ObjectKind.SEAL:
                    return seq, journal_object
            seq += 1
        if len(page) < _LISTED:
            return seq, None


def _listed(names: ShardNames, place: Place, count_max: int) -> Steps[list[tuple[Place, int]]]:
    entries = yield List(names.epoch(place.epoch), names.object(place), count_max)
    places = ((names.place_of_object(entry.key), entry.size_bytes) for entry in entries)
    return [(place, size_bytes) for place, size_bytes in places if place is not None]


def _opened(names: ShardNames, epoch: int) -> Steps[JournalObject]:
    opened = yield from _read(names, Place(epoch, 0), None)
    if opened is None:
        raise CorruptDataError(f"epoch {epoch} of the journal has no open object")
    return opened


def _read(names: ShardNames, place: Place, journal: bytes | None) -> Steps[JournalObject | None]:
    key = names.object(place)
    data = yield from get_or_none(key)
    return None if data is None else decode_object(data, key=key, place=place, journal=journal)


def _bar(names: ShardNames, place: Place, journal: bytes, nonce: bytes) -> Steps[None]:
    """Put a seal ahead of an owner as fast as this process; the owner keeps the places before."""
    while True:
        place = Place(place.epoch, place.seq + IN_FLIGHT_MAX)
        buffers = encode_facts(
            ObjectKind.SEAL,
            {"reason": SealReason.TAKEN},
            place=place,
            journal=journal,
            nonce=nonce,
            previous_checksum=0,
        )
        try:
            yield Create(names.object(place), buffers)
        except ObjectExistsError:
            continue
        return
