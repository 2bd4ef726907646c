"""The SQL names of tables, and the columns of the tables in Spark's catalog.

Spark's session catalog keeps a table's columns of the time of its naming, and PySpark 4.3 never
asks a Python source again (`PythonDataSourceV2.supportsExternalMetadata` is true). So before a
statement on an attached name the table's schema version is compared with the catalog's version, and
a newer version is written to the catalog. Names are of one Spark application.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no types
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from streamhouse.client import StorageClient
from streamhouse.connector.names._wrapped_methods import has_jvm, original_method
from streamhouse.core.errors import StreamhouseError
from streamhouse.reading.options.connection import (
    ConnectionOptions,
    client_for,
    connection_options,
)
from streamhouse.reading.options.quoted_names import quoted

__all__ = [
    "HOOK_MARK",
    "AttachedName",
    "attached",
    "attached_as_written",
    "attached_in",
    "catalog_name",
    "has_attached",
    "is_attached",
    "is_cached",
    "refresh",
    "remember_name",
    "remembered_name",
    "run_as_spark",
]

HOOK_MARK: Final = "_of_spark_alone"
"""The mark of the wrappers of `_hooks.py` around Spark's methods."""
SESSION_CATALOG: Final = "spark_catalog"
_lock: Final = threading.Lock()
_names: Final[dict[tuple[str, str], AttachedName]] = {}


@dataclass(slots=True, kw_only=True)
class AttachedName:
    """One name: `database.name` in Spark, its options, and the version in Spark's catalog.

    `provider` is a format of its own, registered in the session `session`.
    """

    sql_name: str
    provider: str
    options: Mapping[str, str]
    schema: Callable[[], StructType]
    session: str
    version: tuple[int, int] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def connection(self) -> ConnectionOptions:
        """The table and its service."""
        return connection_options(self.options)

    @property
    def client(self) -> StorageClient:
        """The client of the table's service."""
        connection = self.connection
        return client_for(connection.endpoint, connection.token)

    def current_version(self) -> tuple[int, int] | None:
        """Return the table's current identity and schema version; None without versions."""
        name = self.connection.name
        if name.is_iceberg or name.is_metadata:
            return None
        info = self.client.describe_table(str(name.path))
        return info.table_id, info.schema_id


def catalog_name(spark: Any, parts: Sequence[str]) -> str:
    """Return `database.name` in lower case, as in Spark's session catalog."""
    if len(parts) == 3 and parts[0].lower() == SESSION_CATALOG:
        parts = parts[1:]
    if len(parts) == 1:
        parts = (spark.catalog.currentDatabase(), *parts)
    return ".".join(parts).lower()


def remember_name(spark: Any, name: AttachedName) -> None:
    """Remember an attached name."""
    name.version = name.current_version()
    with _lock:
        _names[_application(spark), name.sql_name] = name


def remembered_name(spark: Any, sql_name: str) -> AttachedName | None:
    """Return the attached name `database.name`, even if Spark has dropped the name."""
    return _names.get((_application(spark), sql_name))


def attached(spark: Any, parts: Sequence[str]) -> AttachedName | None:
    """Return the table of an attached name, None for any other name."""
    name = _remembered(spark, parts)
    return name if name is not None and _is_ours(spark, name) else None


def attached_as_written(spark: Any, parts: Sequence[str]) -> AttachedName | None:
    """Return the table of an attached name that no view of the session hides."""
    name = _remembered(spark, parts)
    try:
        is_table = name is not None and is_attached(spark, ".".join(map(quoted, parts)))
    except PySparkException:
        return None
    return name if is_table else None


def _remembered(spark: Any, parts: Sequence[str]) -> AttachedName | None:
    ends = {sql_name.rpartition(".")[2] for _, sql_name in _names}
    if not parts or parts[-1].lower() not in ends:
        return None
    return _names.get((_application(spark), catalog_name(spark, parts)))


def has_attached(spark: Any) -> bool:
    """Whether this application has an attached name."""
    return bool(_names) and _application(spark) in {application for application, _ in list(_names)}


def attached_in(spark: Any, text: str) -> list[AttachedName]:
    """Return the attached names whose last part is in a statement, and perhaps false matches."""
    if not _names:
        return []
    words = set(re.findall(r"\w+", text.lower()))
    mentioned = [key for key in list(_names) if key[1].rpartition(".")[2] in words]
    if not mentioned:
        return []
    application = _application(spark)
    return [_names[key] for key in mentioned if key[0] == application]


def run_as_spark(spark: Any, text: str, **frames: Any) -> Any:
    """Run a statement by Spark's own method; `frames` are DataFrames named in the text."""
    return original_method(type(spark), "sql", mark=HOOK_MARK)(spark, text, **frames)


def refresh(spark: Any, name: AttachedName, *, is_forced: bool = False) -> None:
    """Write the table's columns to Spark's catalog, if the catalog has an earlier version.

    With `is_forced` the columns are always written, because the catalog may have been changed.

    If the service does not answer, the statement itself raises the error.
    """
    try:
        version = name.current_version()
    except StreamhouseError:
        return
    if version == name.version and not is_forced:
        return
    with name.lock:
        if (version == name.version and not is_forced) or not _is_ours(spark, name):
            return
        columns = name.schema().toDDL()
        run_as_spark(spark, f"ALTER TABLE {_quoted(name.sql_name)} REPLACE COLUMNS ({columns})")
        name.version = version


def _is_ours(spark: Any, name: AttachedName) -> bool:
    """Whether the name is still the attached one: Spark may have dropped and reused the name."""
    if not spark.catalog.tableExists(_quoted(name.sql_name)):
        return False
    return is_attached(spark, name.sql_name)


def is_attached(spark: Any, sql_name: str) -> bool:
    """Whether Spark has the name, as written, as a table of a Python source.

    Raises Spark's error for a name that Spark does not have.
    """
    statement = f"DESCRIBE TABLE EXTENDED {sql_name}"
    if has_jvm(spark):
        try:
            return _is_resolved_to_python(spark, statement)
        except Py4JError:
            # Spark's classes are no API: another version may lack one.
            pass
    described = run_as_spark(spark, statement).collect()
    details = {row.col_name: row.data_type for row in described}
    # Spark shows a provider for every table except tables of Python sources, which are catalog
    # entries without data. A view has no type.
    return "Provider" not in details and details.get("Type") in ("MANAGED", "EXTERNAL")


def is_cached(spark: Any, sql_name: str) -> bool:
    """Whether Spark has cached the rows of a name."""
    if has_jvm(spark):
        try:
            # Spark would resolve the name first, also if nothing at all is cached.
            if spark._jsparkSession.sharedState().cacheManager().isEmpty():
                return False
        except Py4JError:
            pass
    return bool(spark.catalog.isCached(sql_name))


def _is_resolved_to_python(spark: Any, statement: str) -> bool:
    """Whether Spark's analyzer finds a Python source for a `DESCRIBE`, which is not executed."""
    state = spark._jsparkSession.sessionState()
    skip = spark._jvm.org.apache.spark.sql.execution.CommandExecutionMode.SKIP()
    plan = state.executePlan(state.sqlParser().parsePlan(statement), skip).analyzed()
    # Views and tables of files have commands of their own.
    if plan.getClass().getSimpleName() != "DescribeRelation":
        return False
    relation = plan.relation()
    if relation.getClass().getSimpleName() != "ResolvedTable":
        return False
    return str(relation.table().getClass().getSimpleName()) == "PythonTable"


def _quoted(sql_name: str) -> str:
    return ".".join(f"`{part}`" for part in sql_name.split("."))


def _application(spark: Any) -> str:
    try:
        return _application_of(spark.sparkContext)
    except Exception:  # noqa: BLE001 - Spark Connect has no context, and raises various errors
        return str(spark.session_id)


@functools.lru_cache(maxsize=1)
def _application_of(context: Any) -> str:
    # The context asks the JVM.
    return str(context.applicationId)
