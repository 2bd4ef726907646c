"""What a merge says of a commit whose answer was lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from streamhouse.client import CommitResult
from streamhouse.connector.changes._commit import committed
from streamhouse.connector.write._write_jobs import StagedRows
from streamhouse.core.errors import (
    CommitConflictError,
    InvalidRequestError,
    StreamhouseError,
    TransactionNotFoundError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.core.model.transaction import TransactionStatus

RESULT = CommitResult(status=TransactionStatus.COMMITTED, ranges={}, row_count=1, timestamp_us=1)
LOST = UnavailableError("no answer")

Answer = CommitResult | TransactionStatus | StreamhouseError


class _Job:
    """Answers what it is told to, one call after the other."""

    transaction_id = "7-ab"

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.calls: list[str] = []

    def commit_if_unchanged(
        self, messages: Sequence[StagedRows], *, read_offsets: Mapping[int, int], isolation: str
    ) -> CommitResult:
        answer = self._next("commit")
        assert isinstance(answer, CommitResult)
        return answer

    def end(self) -> TransactionStatus:
        answer = self._next("end")
        assert isinstance(answer, TransactionStatus)
        return answer

    def _next(self, call: str) -> Answer:
        self.calls.append(call)
        answer = self.answers.pop(0)
        if isinstance(answer, StreamhouseError):
            raise answer
        return answer


def _committed(job: _Job) -> CommitResult:
    return committed(job, [], read_offsets={0: 1}, isolation="snapshot")


@pytest.mark.parametrize("status", [TransactionStatus.COMMITTED, TransactionStatus.COMMITTING])
def test_what_was_committed_all_the_same_is_a_success(status: TransactionStatus) -> None:
    job = _Job(LOST, status, RESULT)

    assert _committed(job) == RESULT
    assert job.calls == ["commit", "end", "commit"]


@pytest.mark.parametrize("error", [LOST, InvalidRequestError("a null in the key")])
def test_what_was_not_committed_fails_as_it_did(error: StreamhouseError) -> None:
    with pytest.raises(type(error), match=error.message):
        _committed(_Job(error, TransactionStatus.ABORTED))


@pytest.mark.parametrize("error", [CommitConflictError("x"), TransactionNotFoundError("x")])
def test_what_the_service_says_of_the_transaction_is_the_outcome(error: StreamhouseError) -> None:
    job = _Job(error)

    with pytest.raises(type(error)):
        _committed(job)

    assert job.calls == ["commit"]


def test_an_outcome_that_nobody_can_tell_comes_with_the_way_to_learn_it() -> None:
    with pytest.raises(UnknownOutcomeError, match=r"no answer.*history\(\) shows transaction 7-ab"):
        _committed(_Job(LOST, UnavailableError("gone")))
