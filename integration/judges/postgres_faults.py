"""Ends a PostgreSQL backend in the middle of a commit to a SQL catalog, at a chosen step."""

from __future__ import annotations

import functools
import threading
from typing import Final

from integration.judges.postgres_server import PostgresServer

__all__ = ["STEPS", "KilledCommit", "prepare_faults"]

STEPS: Final = {
    "statement": "while a row is changed: the commit is known to have failed",
    "commit": "while the database commits: nobody is told, and it has not landed",
    "answer": "between the commit and its answer: nobody is told, and it has landed",
}
# At `answer` the transaction asks to wait for a standby, which there never is.
_FAULTS: Final = (
    "CREATE TABLE fault (step text)",
    """
    CREATE FUNCTION fault_now() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
      IF EXISTS (SELECT FROM fault WHERE step = TG_ARGV[0]) THEN
        PERFORM pg_sleep(600);
      END IF;
      IF EXISTS (SELECT FROM fault WHERE step = 'answer') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
      END IF;
      RETURN NULL;
    END $$
    """,
    "CREATE TRIGGER early AFTER INSERT OR UPDATE ON iceberg_tables"
    " FOR EACH ROW EXECUTE FUNCTION fault_now('statement')",
    "CREATE CONSTRAINT TRIGGER late AFTER INSERT OR UPDATE ON iceberg_tables"
    " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fault_now('commit')",
)
_WAITING: Final = "SELECT pid FROM pg_stat_activity WHERE wait_event IN ('PgSleep', 'SyncRep')"


def prepare_faults(server: PostgresServer, database: str) -> None:
    """Add to the catalog's tables, which must exist, what `KilledCommit` needs."""
    server.sql(*_FAULTS, database=database)


class KilledCommit:
    """Inside `with`, the next commit to the catalog loses its connection at `step`, once."""

    def __init__(self, server: PostgresServer, database: str, *, step: str) -> None:
        assert step in STEPS
        self._sql = functools.partial(server.sql, database=database)
        self._step = step
        self._thread = threading.Thread(target=self._kill, daemon=True)
        self._leaving = threading.Event()
        self.is_done = False
        """Whether a backend was ended."""

    def __enter__(self) -> KilledCommit:
        self._sql(f"INSERT INTO fault VALUES ('{self._step}')")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join()
        self._sql("DELETE FROM fault")

    def _kill(self) -> None:
        # The pause is what `sql` takes to start its program.
        while not self._leaving.is_set():
            waiting = self._sql(_WAITING)
            if waiting:
                # What comes next, perhaps the same commit again, goes through.
                killed = self._sql(
                    "DELETE FROM fault", f"SELECT pg_terminate_backend({waiting[0]}, 10000)"
                )
                self.is_done = killed == ["t"]
                return
