"""The request of a read, whichever tier the rows are in."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamhouse.reading.scan.scan import BATCH_ROWS, ChangeForm, ScanColumn
from streamhouse.reading.where.predicate import Predicate

__all__ = ["RowRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """The columns of a read, and the conditions on its rows.

    Rows have `from_timestamp_us <= __timestamp < to_timestamp_us`, where a bound is set. Of changes
    only the types in `change_types` are read, None means all. With `change_form` they are in
    Spark's form. `endpoint` and `token` are of the service with the log.
    """

    output: tuple[ScanColumn, ...] = ()
    predicate: Predicate | None = None
    from_timestamp_us: int | None = None
    to_timestamp_us: int | None = None
    change_types: tuple[int, ...] | None = None
    change_form: ChangeForm | None = None
    fail_on_data_loss: bool = True
    endpoint: str = ""
    token: str | None = field(default=None, repr=False)
    batch_rows: int = BATCH_ROWS
