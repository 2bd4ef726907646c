"""Live tables of the service's REST catalog, read by stock pyiceberg while the service dies.

What was acknowledged before a live table was loaded is in it, transactions are whole, and nothing
is there that nobody sent. The cut of the last check before a death is read again after it: it still
has its rows, or its files are gone and the read says so.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from typing import Final

import pyarrow as pa
from pyiceberg.table import StaticTable

from streamhouse.api.client import StreamhouseClient
from tests.torture.checkers import KeyChecker, KeyTransactionChecker, LogChecker, TransactionChecker
from tests.torture.ledger import KeyLedger
from tests.torture.writers import KEYS_PER_WRITER, TransactionWriter

__all__ = ["LiveChecker"]

# An owner that was paused does not answer at all.
_TIMEOUT_S: Final = 10.0

Row = tuple[int, int]
"""(writer, number), or (key, version)"""


class LiveChecker:
    """Judges the live table of the table that `beside` judges by the log."""

    def __init__(self, beside: LogChecker | TransactionChecker | KeyChecker) -> None:
        self.table = beside.table
        self._beside = beside
        self._columns = ("writer", "number")
        if isinstance(beside, KeyChecker):
            self._columns = ("key", "version")
        self._kept: tuple[str, list[Row]] | None = None

    def check(self, client: StreamhouseClient, *, is_quiet: bool) -> int:
        """Judge the cut that was kept, and load another one; return how many rows."""
        if self._kept is not None:
            location, rows = self._kept
            try:
                again = self._read(location)
            except OSError:  # a worker expired its files: the pins of a dead service have ended
                again = rows
            assert again == rows, f"{self.table}: a live cut changed by a death"
        return self._load(client, is_still=True)

    def check_cut(self, client: StreamhouseClient) -> int:
        """Judge a cut while others write."""
        return self._load(client, is_still=False)

    def _load(self, client: StreamhouseClient, *, is_still: bool) -> int:
        """Load and judge the live table; `is_still`: no call begins meanwhile."""
        ledger = self._beside.ledger
        before = ledger.allowed() if isinstance(ledger, KeyLedger) else ledger.untaken()
        location = self._location(client)
        if location is None:
            return 0
        rows = self._read(location)
        self._kept = location, rows
        if isinstance(self._beside, KeyChecker):
            self._judge_keys(rows, before if is_still else {})
        else:
            self._judge_log(rows, self._beside.image.counts.keys() | before)
        return len(rows)

    def _judge_log(self, rows: list[Row], stored: set[Row]) -> None:
        copies, counts = 1, Counter(rows)
        if isinstance(self._beside, TransactionChecker):
            copies = TransactionWriter.PARTS * TransactionWriter.ROWS
        wrong = [row for row, count in counts.items() if count != copies]
        assert not wrong, f"{self.table}, live: not there {copies} times: {sorted(wrong)[:5]}"
        lost = stored - counts.keys()
        assert not lost, f"{self.table}, live: rows from before are lost: {sorted(lost)[:5]}"
        invented = self._beside.ledger.unsent(counts)
        assert not invented, f"{self.table}, live: rows nobody sent: {invented[:5]}"

    def _judge_keys(self, rows: list[Row], before: dict[int, set[int | None]]) -> None:
        versions = dict(rows)
        assert len(versions) == len(rows), f"{self.table}, live: keys are there twice"
        after = self._beside.ledger.allowed()
        for key, allowed in before.items():
            version = versions.get(key)
            assert version in allowed | after[key], (
                f"{self.table}, live: key {key} has version {version}, allowed are {allowed}"
            )
        if isinstance(self._beside, KeyTransactionChecker):
            whole = {(key // KEYS_PER_WRITER, version) for key, version in rows}
            assert len(whole) * KEYS_PER_WRITER == len(rows), f"{self.table}, live: torn: {whole}"

    def _location(self, client: StreamhouseClient) -> str | None:
        """Load the live table; None if the service is not there, or not yet."""
        host = client.endpoint_of(self.table)
        url = f"{host}/iceberg/v1/live/namespaces/default/tables/{self.table}"
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                return str(json.load(answer)["metadata-location"])
        except urllib.error.HTTPError as error:
            if error.code != 503:
                said = error.read().decode()
                raise AssertionError(f"{self.table}, live: {error.code} {said}") from error
        except OSError:
            pass
        return None

    def _read(self, location: str) -> list[Row]:
        rows: pa.Table = (
            StaticTable.from_metadata(location).scan(selected_fields=self._columns).to_arrow()
        )
        pair = (rows.column(name).to_pylist() for name in self._columns)
        return sorted(zip(*pair, strict=True))

    def check_lake(self, client: StreamhouseClient) -> None:
        """The lake is judged by the one beside."""

    def check_at_end(self, client: StreamhouseClient) -> None:
        """Judge once more, with everything in the lake."""
        self.check(client, is_quiet=True)
