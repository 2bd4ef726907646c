"""Judges every table of an attacked directory: its answers are right, or refused with a sentence.

Nothing in between is allowed: no row that was never acknowledged, none missing, none twice, none
that was deleted, in logs, lookups, counts, union reads and the lake, before and after new writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import NotFoundError, StreamhouseError
from streamhouse.core.model.changelog import DELETE, INSERT, UPDATE_BEFORE
from tests.attack.world import KEYS, NEW_ROWS_FROM, AttackedTable, key_rows
from tests.support.tier_once import tier_once

__all__ = ["Verdict", "Violation", "judge_old_table", "judge_table"]

_NEW: Final = range(NEW_ROWS_FROM, NEW_ROWS_FROM + 30)


class Violation(AssertionError):
    """A table answered something that is not true."""


@dataclass
class Verdict:
    """What was refused, in order: step and sentence. Empty: everything was answered, and right."""

    path: str
    refusals: list[tuple[str, StreamhouseError]] = field(default_factory=list)
    answers: int = 0

    def ask(self, step: str, question: Callable[[], Any]) -> Any:
        """Return the answer, or None if it was refused as it should be."""
        try:
            answer = question()
        except StreamhouseError as error:
            sentence = error.message
            if error.code == "internal" or not sentence or "Traceback" in sentence:
                raise Violation(f"{self.path}: {step}: {error.code}: {sentence}") from error
            if isinstance(error, NotFoundError) and "does not exist" in sentence:
                # A table that is said not to exist will be created anew, and its rows forgotten.
                raise Violation(f"{self.path}: {step}: {sentence}") from error
            self.refusals.append((step, error))
            return None
        self.answers += 1
        return answer


def judge_table(
    client: StreamhouseClient,
    table: AttackedTable,
    *,
    is_written: bool,
    token: str | None = None,
) -> Verdict:
    """Judge all that a table answers; `is_written`: write to it, and tier it, and judge again."""
    verdict = Verdict(table.path)
    _judge_reads(client, table, verdict)
    if is_written:
        _write(client, table, verdict)
        _judge_reads(client, table, verdict)
        if table.has_lake and verdict.ask(
            "tier", lambda: tier_once(client, table.path, token=token) + 1
        ):
            _judge_reads(client, table, verdict)
    return verdict


def judge_old_table(client: StreamhouseClient, table: AttackedTable) -> Verdict:
    """Judge a table that was put back to an older state as a whole, behind its lake.

    What is in no other place cannot be missed. But the lake knows more than the log: nobody may
    read both as one table, and no row of the lake may be replaced.
    """
    verdict = Verdict(table.path)

    def read_lake() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = client.read(f"{table.path}$lake").to_pylist()
        return sorted(rows, key=lambda row: row["id"])

    lake = verdict.ask("read lake", read_lake)
    rows = key_rows(range(NEW_ROWS_FROM, NEW_ROWS_FROM + 2_000), "new")
    write = client.upsert if table.is_keyed else client.append
    for step, call in (
        ("read", lambda: client.read(table.path)),
        ("write", lambda: write(table.path, rows)),
        ("tier", lambda: tier_once(client, table.path) + 1),
    ):
        if verdict.ask(step, call) is not None:
            raise Violation(f"{table.path}: the log is older than the lake, and {step} goes on")
    if verdict.ask("read lake", read_lake) != lake:
        raise Violation(f"{table.path}: rows of the lake were replaced")
    return verdict


def _judge_reads(client: StreamhouseClient, table: AttackedTable, verdict: Verdict) -> None:
    path = table.path
    if verdict.ask("describe", lambda: client.describe_table(path)) is None:
        return
    rows = verdict.ask("read", lambda: client.read(path))
    if rows is not None:
        _check_rows(table, rows, "the union read")
    part = verdict.ask("read where", lambda: client.read(path, where="id >= 210 AND id < 2010"))
    if part is not None:
        _check_rows(table, part, "the filtered read", ids=range(210, 2_010))
    if table.has_lake:
        lake = verdict.ask("read lake", lambda: client.read(f"{path}$lake"))
        if lake is not None:
            _check_lake(table, lake)
    if table.is_keyed:
        _judge_keys(client, table, verdict)
    else:
        _judge_log(client, table, verdict)


def _judge_keys(client: StreamhouseClient, table: AttackedTable, verdict: Verdict) -> None:
    asked = [*table.rows, *table.gone, 9_999_999]
    keys = pa.table({"id": asked}, schema=KEYS)
    found = verdict.ask("lookup", lambda: client.lookup(table.path, keys))
    if found is not None:
        answers = zip(asked, found.select(["name", "amount"]).to_pylist(), strict=True)
        for one, answer in answers:
            row = table.rows.get(one)
            expected = (row["name"], row["amount"]) if row else (None, None)
            if (answer["name"], answer["amount"]) != expected:
                raise Violation(f"{table.path}: lookup of {one} is {answer}, not {expected}")
    count = verdict.ask("count", lambda: client.count(table.path))
    if count is not None and count != len(table.rows):
        raise Violation(f"{table.path}: count is {count}, {len(table.rows)} keys are there")
    for one in (*list(table.rows)[:2], 9_999_999):
        row = verdict.ask("get", lambda one=one: (client.lookup_one(table.path, id=one),))
        if row is not None and (row[0] or {}).get("name") != table.rows.get(one, {}).get("name"):
            raise Violation(f"{table.path}: the row of {one} is {row[0]}")


def _judge_log(client: StreamhouseClient, table: AttackedTable, verdict: Verdict) -> None:
    """Every row that the log gives was acknowledged once, and its whole log has all of them."""
    positions = verdict.ask("positions", lambda: client.positions(table.path))
    if positions is None:
        return
    seen: Counter[int] = Counter()
    is_whole = True
    for bucket, ends in positions.items():
        start, end = ends.log_start_offset, ends.high_watermark
        pages = verdict.ask(
            "fetch",
            lambda b=bucket, s=start, e=end: list(client.read_range(table.path, b, s, e)),
        )
        if pages is None:
            is_whole = False
            continue
        for page in pages:
            _check_known(table, page.data.to_pylist(), "the log", may_be_gone=True)
            seen.update(page.data.column("id").to_pylist())
    if twice := [one for one, count in seen.items() if count > 1]:
        raise Violation(f"{table.path}: the log has row {twice[0]} twice")
    lost = table.rows.keys() - seen.keys()
    if is_whole and lost:
        raise Violation(f"{table.path}: the log lacks {len(lost)} rows, such as {min(lost)}")


def _check_rows(table: AttackedTable, rows: pa.Table, where: str, ids: range | None = None) -> None:
    expected = {one for one in table.rows if ids is None or one in ids}
    found = Counter(rows.column("id").to_pylist())
    if twice := [one for one, count in found.items() if count > 1]:
        raise Violation(f"{table.path}: {where} has row {twice[0]} twice")
    if lost := expected - found.keys():
        raise Violation(
            f"{table.path}: {where} lacks {len(lost)} of {len(expected)} rows, such as {min(lost)}"
        )
    if more := found.keys() - expected:
        raise Violation(f"{table.path}: {where} has {len(more)} rows more, such as {min(more)}")
    if set(rows.column_names) != set(table.columns):
        raise Violation(f"{table.path}: {where} has columns {rows.column_names}")
    _check_known(table, rows.to_pylist(), where)


def _check_lake(table: AttackedTable, rows: pa.Table) -> None:
    """The lake may be behind; it has no row twice and none that was never there."""
    found = Counter(rows.column("id").to_pylist())
    if twice := [one for one, count in found.items() if count > 1]:
        raise Violation(f"{table.path}: the lake has row {twice[0]} twice")
    if never := found.keys() - table.rows.keys() - table.gone:
        raise Violation(f"{table.path}: the lake has row {min(never)}, which was never written")


def _check_known(
    table: AttackedTable,
    rows: Iterable[dict[str, Any]],
    where: str,
    *,
    may_be_gone: bool = False,
) -> None:
    for row in rows:
        known = table.rows.get(row["id"])
        if known is None:
            if may_be_gone and row["id"] in table.gone:
                continue
            raise Violation(f"{table.path}: {where} has row {row['id']}, which is not there")
        if any(row.get(name) != known[name] for name in table.columns):
            raise Violation(f"{table.path}: {where} has {row}, not {known}")


def _write(client: StreamhouseClient, table: AttackedTable, verdict: Verdict) -> None:
    """New rows, and for keys changed and deleted ones; the changelog must say what was there."""
    if not table.is_keyed:
        rows = key_rows(_NEW, "new")
        if verdict.ask("append", lambda: client.append(table.path, rows)) is not None:
            table.put(rows)
        return
    old = list(table.rows)[::7][:40]
    rows = key_rows([*_NEW, *old], "new")
    before = {one: table.rows.get(one) for one in (*_NEW, *old)}
    written = verdict.ask("upsert", lambda: client.upsert(table.path, rows))
    if written is not None:
        table.put(rows)
        _check_changes(client, table, verdict, written, before)
    gone = [one for one in table.rows if one < NEW_ROWS_FROM][:10]
    keys = pa.table({"id": gone}, schema=KEYS)
    deleted = verdict.ask("delete", lambda: client.delete(table.path, keys))
    if deleted is not None:
        before = {one: table.rows[one] for one in gone}
        table.take(gone)
        _check_changes(client, table, verdict, deleted, before)


def _check_changes(
    client: StreamhouseClient,
    table: AttackedTable,
    verdict: Verdict,
    written: dict[int, tuple[int, int]],
    before: dict[int, dict[str, Any] | None],
) -> None:
    """`+I` and no before image exactly for ids that were not there."""
    had: set[int] = set()
    inserted: set[int] = set()
    for bucket, (start, end) in written.items():
        pages = verdict.ask(
            "changes",
            lambda b=bucket, s=start, e=end: list(client.read_range(table.path, b, s, e)),
        )
        if pages is None:
            return
        for page in pages:
            for change in page.data.to_pylist():
                one, kind = change["id"], change["__change_type"]
                if kind == INSERT:
                    inserted.add(one)
                elif kind in (UPDATE_BEFORE, DELETE):
                    had.add(one)
                    row = before.get(one)
                    if row is None or row["name"] != change["name"]:
                        raise Violation(f"{table.path}: before image {change}, the row was {row}")
    there = {one for one, row in before.items() if row is not None}
    if had != there or inserted != before.keys() - there:
        wrong = sorted((had ^ there) | (inserted ^ (before.keys() - there)))
        raise Violation(f"{table.path}: the changelog is wrong about key {wrong[0]}")
