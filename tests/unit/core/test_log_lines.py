"""Log lines: one an event, readable by machines."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.log_lines import (
    REQUEST_ID,
    JsonFormatter,
    KeyValueFormatter,
    template_fields,
)
from tests.support.in_process_service import in_process_service


def _record(message: str, *arguments: object, **fields: object) -> logging.LogRecord:
    record = logging.LogRecord("a.b", logging.INFO, "f.py", 1, message, arguments, None)
    for name, value in fields.items():
        record.__dict__[name] = value
    return record


def _line(message: str, *arguments: object, **fields: object) -> str:
    return KeyValueFormatter().format(_record(message, *arguments, **fields))


def _object(message: str, *arguments: object, **fields: object) -> dict[str, Any]:
    found = json.loads(JsonFormatter().format(_record(message, *arguments, **fields)))
    assert isinstance(found, dict)
    return found


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


def test_fields_are_fields_of_an_object_with_their_types() -> None:
    line = _object("event=x table=%s rows=%d seconds=%.1f why=%r", "a.t", 3, 1.26, "it's \n so")

    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "a.b",
        "event": "x",
        "table": "a.t",
        "rows": 3,
        "seconds": 1.3,
        "why": "it's \n so",
    }


def test_a_field_of_several_arguments_is_their_text() -> None:
    line = _object(
        "event=x position=%X/%X why='%s of %d' share=5%% is_new=%s", 255, 1, "a", 2, True
    )

    assert line["position"] == "FF/1"
    assert line["why"] == "a of 2"
    assert line["share"] == "5%"
    assert line["is_new"] is True


def test_other_messages_are_a_message() -> None:
    assert _object("listening on %s", "here")["message"] == "listening on here"
    assert _object("event=x and more %(a)s", {"a": 1})["message"] == "event=x and more 1"
    assert template_fields("event=x: %s") is None
    assert template_fields("table=%s") is None


def test_a_trace_and_the_id_of_the_request_are_fields() -> None:
    outer = REQUEST_ID.set("r-1")
    try:
        raise ValueError("why")
    except ValueError:
        line = _object("event=bug", exc_info=sys.exc_info())
    finally:
        REQUEST_ID.reset(outer)

    assert line["request_id"] == "r-1"
    assert line["trace"].endswith("ValueError: why")


@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(
            lambda name: name not in ("time", "level", "logger", "event", "trace", "request_id")
        ),
        st.one_of(st.integers(), st.text(), st.booleans(), st.none()),
        max_size=5,
    )
)
def test_whatever_a_value_is_it_comes_back_out_of_the_line(values: dict[str, Any]) -> None:
    template = "event=x" + "".join(f" {name}=%s" for name in values)

    text = JsonFormatter().format(_record(template, *values.values()))

    assert "\n" not in text
    line = json.loads(text)
    assert {name: line[name] for name in values} == values
