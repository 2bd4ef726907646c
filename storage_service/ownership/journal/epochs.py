"""Who may write: epochs, taken in order and ended by a seal, all by creating what is not there.

Promises, whatever the store delays, reorders, loses or lists late (only `create` is trusted):
- an epoch ends at its first seal; what lies behind it was never acknowledged
- epoch E + 1 is opened once, by one owner, and only after E has a seal
- a taker seals the first place without an object; it never passes one

What this needs of trimming (`trim.py`): an epoch loses objects only once a *later* epoch is open,
and never its open object nor its seal. So the newest epoch has no holes that trimming made, and an
owner who lives on opens a new epoch (`JournalWriter.roll`) before it trims.
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
"""No owner has so many objects in flight: behind a first gap there are fewer."""
_CHASES: Final = 3
_LISTED: Final = 1_000


class TakenByOtherError(Exception):
    """Another process opened the epoch: this one owns nothing. Look at who, then try again."""


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
    """What the open object of an epoch says. Epoch 1 follows epoch 0, which never was."""

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
        """Return the seal that was found in an epoch that `facts` open."""
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
    """Return a seal of the epoch that `facts` open, and its object, which is to be stored."""
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
    """One's own epoch. `nonce` is of the process: it stays when the process rolls its epoch."""

    names: ShardNames
    epoch: int
    nonce: bytes = field(repr=False)
    facts: OpenFacts
    checksum: int
    """That of the open object."""

    @property
    def journal(self) -> bytes:
        """What all objects of this journal say of whose they are."""
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
        raise CorruptDataError(f"object {key} of the journal does not open an epoch as it must")
    return OpenFacts(**{name: open_object.facts[name] for name in OpenFacts.__slots__})


def read_open(names: ShardNames, epoch: int) -> Steps[OpenFacts]:
    """Return what opens an epoch that was listed. Raises `CorruptDataError`."""
    opened = yield from _opened(names, epoch)
    return open_facts(opened, key=names.object(opened.place))


def newest_epoch(names: ShardNames, *, at_least: int = 0) -> Steps[int]:
    """Return the newest epoch that is listed, 0 if there is none. It may be older than the newest.

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

    An owner who goes on meanwhile is met by a seal further on, so this ends.
    Raises `TakenByOtherError` if a later epoch is open.
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
    """Return the seal of an epoch, or None if it has none, as far as is listed."""
    opened = yield from _read(names, Place(epoch, 0), None)
    if opened is None:
        return None
    try:
        met = yield from _end(names, opened)
    except TakenByOtherError:
        # It was trimmed meanwhile: it is not the newest, which is what was asked for.
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
    """Become the owner of the epoch after `after`, which ends; 0 if there is none.

    The owner of `after` is fenced: call this only when that is wanted. Raises
    `TakenByOtherError` if somebody else was quicker, or `after` is not the newest.
    """
    nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
    seal = (yield from seal_epoch(names, after, nonce=nonce)) if after else None
    facts = {"endpoint": endpoint, "lease_ms": lease_ms}
    return (yield from open_epoch(names, seal, nonce=nonce, facts=facts))


def is_same_as(buffers: list[Any]) -> Callable[[memoryview], bool]:
    """Return what tells whether an object is this one: by all its bytes."""
    return lambda data: data == b"".join(buffers)


def _greatest(low: int, maximum: int, next_after: Callable[[int], Steps[int]]) -> Steps[int]:
    """Return the greatest number there is, at least `low`, if `after` says which follows one."""
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
    """Return the epoch's seal, or the object before its first gap, as far as is listed.

    Behind a gap or a seal an owner had fewer than `IN_FLIGHT_MAX` objects. So a run of as many
    operations has neither before it, and only the last places have to be looked at.
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
        # Trimmed since it was listed: only an epoch that has a later one is.
        yield from _check_newest(names, epoch)
        raise CorruptDataError(f"{names.object(Place(epoch, end))} was listed and is gone")
    return end_object


def _check_newest(names: ShardNames, epoch: int) -> Steps[None]:
    if (yield from get_or_none(names.object(Place(epoch + 1, 0)))) is not None:
        raise TakenByOtherError(f"epoch {epoch + 1} of the journal is open")


def _end_of_run(
    names: ShardNames, opened: JournalObject, first: int
) -> Steps[tuple[int, JournalObject | None]]:
    """Return the last seq of those that follow `first` without a gap, and the seal after it."""
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
        raise CorruptDataError(f"epoch {epoch} of the journal has no object that opens it")
    return opened


def _read(names: ShardNames, place: Place, journal: bytes | None) -> Steps[JournalObject | None]:
    key = names.object(place)
    data = yield from get_or_none(key)
    return None if data is None else decode_object(data, key=key, place=place, journal=journal)


def _bar(names: ShardNames, place: Place, journal: bytes, nonce: bytes) -> Steps[None]:
    """Put a seal ahead of an owner that is as quick as we are: it has the places up to there."""
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
