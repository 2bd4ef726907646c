"""Log lines: one an event, readable by machines."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

from streamhouse.storage_service.log_lines import REQUEST_ID, KeyValueFormatter
from tests.support.in_process_service import in_process_service


def _line(message: str, *arguments: object, **fields: object) -> str:
    record = logging.LogRecord("a.b", logging.INFO, "f.py", 1, message, arguments, None)
    for name, value in fields.items():
        record.__dict__[name] = value
    return KeyValueFormatter().format(record)


def test_an_event_is_one_line_of_keys_and_values() -> None:
    line = _line("event=retention table=%s segments=%d", "default.t", 3)

    assert re.fullmatch(
        r"time=\d{4}-\d\d-\d\dT\S+\+00:00 level=info logger=a\.b event=retention"
        r" table=default\.t segments=3",
        line,
    )


def test_other_messages_are_quoted_and_stay_on_one_line() -> None:
    assert _line("two\nlines").endswith("message='two\\\\nlines'")


def test_a_trace_follows_its_line() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        text = _line("event=bug", exc_info=sys.exc_info())

    assert text.splitlines()[0].endswith("event=bug")
    assert text.splitlines()[-1] == "ValueError: why"


def test_a_line_of_a_request_has_its_id_and_others_have_none() -> None:
    outer = REQUEST_ID.set("r-1")
    try:
        assert _line("event=x").endswith("event=x request_id=r-1")
        assert _line("event=x request_id=r-1 a=b").endswith("event=x request_id=r-1 a=b")
        assert _line("no event").endswith("message='no event' request_id=r-1")
    finally:
        REQUEST_ID.reset(outer)
    assert "request_id" not in _line("event=x")


async def test_work_on_other_threads_keeps_the_request_id(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        REQUEST_ID.set("r-2")
        assert await service.service.run_blocking(REQUEST_ID.get) == "r-2"
