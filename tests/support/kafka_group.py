"""A consumer group that outlives its service: its only member reads, and commits what it has read.

It judges what it is given while it reads: offsets without gaps, the same record whenever an offset
comes again, and never one below where the group has committed.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from confluent_kafka import Consumer, KafkaException

__all__ = ["GroupMember", "LibrdkafkaMember", "PollingGroup"]

_CLIENT: Final = {
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    # librdkafka 2.16 asks for its topics once before it joins a group. If the broker dies with that
    # question unanswered, the consumer joins at its next refresh, by default in five minutes.
    "topic.metadata.refresh.interval.ms": 1_000,
    # Each attempt to connect to a service that is dead would be a line.
    "log_level": 0,
}


class GroupMember(Protocol):
    """A consumer that has subscribed."""

    def poll(self) -> Sequence[tuple[int, int, bytes]]:
        """Wait a moment for records; return partition, offset and value of each."""

    def commit(self) -> Mapping[int, int]:
        """Commit what was polled; return where each partition is that is known to be committed."""

    def close(self) -> None:
        """Leave the group."""


class LibrdkafkaMember:
    """confluent-kafka's consumer."""

    def __init__(self, brokers: str, topic: str, group: str, **settings: Any) -> None:
        self._consumer = Consumer(
            {
                **_CLIENT,
                "bootstrap.servers": brokers,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 6_000,
                **settings,
            }
        )
        self._consumer.subscribe([topic])

    @property
    def partitions(self) -> list[int]:
        """Those that it has been given."""
        return [place.partition for place in self._consumer.assignment()]

    def poll(self) -> Sequence[tuple[int, int, bytes]]:
        """See `GroupMember.poll`."""
        return [
            (message.partition() or 0, message.offset() or 0, message.value() or b"")
            for message in self._consumer.consume(500, 0.1)
            if not message.error()
        ]

    def commit(self) -> Mapping[int, int]:
        """See `GroupMember.commit`."""
        try:
            told = self._consumer.commit(asynchronous=False) or []
        except KafkaException:
            return {}
        return {place.partition: place.offset for place in told if place.error is None}

    def close(self) -> None:
        """See `GroupMember.close`."""
        self._consumer.close()


class PollingGroup(threading.Thread):
    """See the module. `open_member` makes each member; there is one at a time."""

    def __init__(self, open_member: Callable[[], GroupMember], *, patience_s: float = 60.0) -> None:
        super().__init__(name="kafka group", daemon=True)
        self._open_member = open_member
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._seen: dict[int, list[bytes]] = defaultdict(list)
        self._committed: dict[int, int] = defaultdict(int)
        self._is_over = False
        self._begins_anew = False
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._is_over:
                self._begins_anew = False
                self._read_as(self._open_member())
        except BaseException as error:  # noqa: BLE001 - told to the main thread, which raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _read_as(self, member: GroupMember) -> None:
        """Read from where the group stands, until it is to end or to begin anew."""
        try:
            while not self._is_over and not self._begins_anew:
                records = member.poll()
                for bucket, offset, value in records:
                    self._see(bucket, offset, value)
                if records:
                    # Not known: the position is the one before or this one.
                    self._committed.update(member.commit())
        finally:
            member.close()

    def _see(self, bucket: int, offset: int, value: bytes) -> None:
        least = self._committed[bucket]
        # A member that has lost its place begins where the group stands.
        assert least <= offset <= len(self._seen[bucket]), (
            f"the group is given offset {offset} of {bucket}, has committed {least}, and has seen"
            f" those below {len(self._seen[bucket])}"
        )
        with self._changed:
            seen = self._seen[bucket]
            if offset == len(seen):
                seen.append(value)
                self._changed.notify_all()
            assert seen[offset] == value, f"offset {offset} of {bucket} has become another record"

    def begin_anew(self) -> None:
        """Let another member go on where the group stands."""
        self._begins_anew = True

    def wait_for(self, count: int) -> None:
        """Wait until it has seen so many records; raises what it raised."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._seen_count() >= count, self._patience_s
            )
            self._raise()
            assert self._seen_count() >= count, f"the group has seen {self._seen_count()}"

    def judge(self, logged: Mapping[int, Sequence[bytes]]) -> None:
        """It comes to see every record, in order."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: (
                    self._error is not None
                    or all(len(self._seen[b]) >= len(rows) for b, rows in logged.items())
                ),
                self._patience_s,
            )
            self._raise()
            assert arrived, (
                f"the group is at { {b: len(self._seen[b]) for b in logged} }, not at"
                f" { {b: len(rows) for b, rows in logged.items()} }"
            )
            assert dict(self._seen) | {b: r for b, r in logged.items() if not r} == logged

    def end(self) -> None:
        """End it."""
        self._is_over = True
        self.join(self._patience_s)

    def _seen_count(self) -> int:
        return sum(map(len, self._seen.values()))

    def _raise(self) -> None:
        if self._error is not None:
            raise AssertionError("the group failed") from self._error
