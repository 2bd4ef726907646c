"""Refuses uses of a name with different options in the same statement, and options of a view.

Spark looks a name up once a statement. All uses of the name share one Python source, made with the
options of the first use. The plan has the remaining options, but Spark ignores them. The same
happens to a use with options of a cached name. A view has no options: Spark drops them.

With a JVM in reach, the analyzed plan shows which uses share a source, also within views and
subqueries. In scripts, for commands under Spark Connect, and in PySpark before 4.3, whose plans
have the options of the first use alone, the statement's text is checked; a view has no options.
A query with options is refused under Spark Connect: the server combines queries unseen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no types
from pyspark.errors import PySparkException

from streamhouse.connector._spark_versions import SHOWS_OPTIONS_OF_USES
from streamhouse.connector.names._attached_names import (
    AttachedName,
    attached,
    has_attached,
    remembered_name,
    run_as_spark,
)
from streamhouse.connector.names._option_uses import (
    Use,
    is_defined_in,
    plain_uses,
    uses_with_options,
)
from streamhouse.connector.names._table_statement import tokens_of, unquoted
from streamhouse.connector.names._wrapped_methods import has_jvm
from streamhouse.core.errors import UnsupportedError
from streamhouse.reading.options.options import OPTIONS
from streamhouse.reading.options.quoted_names import quoted

__all__ = ["check_plan", "check_statement", "check_view_options", "is_name_of_view"]

_COMMANDS: Final = re.compile(
    r"(?:\s|--(?>(?:\\\n|[^\r\n])*)|/\*.*?\*/)*"
    r"(?:(?:WITH|FROM)\b.*\bINSERT|INSERT|CREATE|REPLACE|CACHE|MERGE)\b",
    re.IGNORECASE | re.DOTALL,
)
"""Statements that store or note the result of a query before its plan is checked."""
_SCRIPTS: Final = re.compile(r"\s*(?:BEGIN|EXECUTE)\b", re.IGNORECASE)
_VIEW: Final = "View ("
"""The mark of a view in Spark's text of a plan."""
_RELATION: Final = "RelationV2"
"""The mark of a relation that may be a Python source, in Spark's text of a plan."""
_RELATIONS: Final = ("DataSourceV2Relation", "StreamingRelationV2")
_READ_OPTIONS: Final = {option.key.lower() for option in OPTIONS}
_SECRETS: Final = ("token",)


def check_statement(spark: Any, text: str) -> None:
    """Raise `UnsupportedError` for a problem that shows before Spark executes a statement.

    The result of a query is checked by `check_plan`, which costs less.
    """
    uses = list(uses_with_options(text))
    for use in uses:
        if is_defined_in(use.name, text) or attached(spark, use.name) is None:
            check_view_options(spark, use.name, use.options, is_query=is_defined_in(use.name, text))
    is_script = _SCRIPTS.match(text) is not None
    if has_jvm(spark) and not is_script:
        is_checked = True
        if _COMMANDS.match(text) and has_attached(spark):
            plan = _analyzed(spark, text)
            is_checked = plan is not None
            if is_checked:
                _check_shared(spark, plan, uses)
        if is_checked and SHOWS_OPTIONS_OF_USES:
            return
    _check_text(spark, text, is_script=is_script)
    is_view = re.search(r"\bVIEW\b", text, re.IGNORECASE) is not None
    if not is_script and (not has_jvm(spark) or (is_view and not SHOWS_OPTIONS_OF_USES)):
        _check_combinable(spark, text, uses, is_view=is_view)


def check_plan(spark: Any, frame: Any, *, text: str = "", has_options: bool = False) -> None:
    """Raise `UnsupportedError` if uses of one name in a frame share a source and differ.

    `text` is the statement; `has_options` tells of options of a reader. Without both the plan is
    searched only if it has a view, which may hide options: each search asks the JVM.
    """
    if not has_jvm(spark) or not has_attached(spark):
        return
    plan = frame._jdf.queryExecution().analyzed()
    uses = list(uses_with_options(text))
    if not has_options and not uses:
        plan_text = plan.toString()
        if _VIEW not in plan_text or _RELATION not in plan_text:
            return
    _check_shared(spark, plan, uses)


def check_view_options(
    spark: Any, name: Sequence[str], options: Mapping[str, Any], *, is_query: bool = False
) -> None:
    """Raise `UnsupportedError` for read options on a view, which Spark drops."""
    ours = {key: str(text) for key, text in options.items() if key.lower() in _READ_OPTIONS}
    if ours and (is_query or is_name_of_view(spark, name)):
        shown = ".".join(name)
        raise UnsupportedError(
            f"options ({_listed(ours)}) of '{shown}', which is a view or a query: Spark drops them"
            " there; give them where the table is named, in load(...), attach(...), or behind the"
            f" name that the view reads, or filter '{shown}'"
        )


def is_name_of_view(spark: Any, name: Sequence[str]) -> bool:
    """Whether a name is a view's, of the session or of the catalog."""
    try:
        table = spark.catalog.getTable(".".join(f"`{part}`" for part in name))
    except PySparkException:
        return False
    return table.tableType in ("TEMPORARY", "VIEW")


# -- by the plan -----------------------------------------------------------------------------------


def _analyzed(spark: Any, text: str) -> Any:
    """Return the plan of a statement without execution; None if Spark objects."""
    try:
        state = spark._jsparkSession.sessionState()
        skip = spark._jvm.org.apache.spark.sql.execution.CommandExecutionMode.SKIP()
        return state.executePlan(state.sqlParser().parsePlan(text), skip).analyzed()
    except (Py4JError, PySparkException):
        # Spark itself raises the error later, or the statement has parameters.
        return None


def _check_shared(spark: Any, plan: Any, uses: Sequence[Use]) -> None:
    if not SHOWS_OPTIONS_OF_USES and _VIEW in plan.toString():
        _check_views(spark, plan, uses)
    first: dict[int, dict[str, str]] = {}
    for leaf, kind in _leaves(plan):
        identifier = leaf.identifier()
        if not identifier.isDefined():
            # A load has a source of its own.
            continue
        name = str(identifier.get().toString())
        table = spark._jvm.System.identityHashCode(leaf.table())
        is_batch = kind == "DataSourceV2Relation"
        options = _options_in_plan(leaf, kind)
        is_shared = options != first.setdefault(table, options)
        if (
            not (is_shared or options)
            or (attached_name := attached(spark, tuple(name.split(".")))) is None
        ):
            continue
        if is_shared:
            raise _differing(attached_name, first[table], options)
        if is_batch and spark.catalog.isCached(name):
            raise UnsupportedError(
                f"'{attached_name.sql_name}' is cached, so WITH ({_listed(options)}) would give the"
                f" cached rows; UNCACHE TABLE it, or {_advice(attached_name, options)}"
            )


def _check_views(spark: Any, plan: Any, uses: Sequence[Use]) -> None:
    """Refuse options where views share a source with others: such a plan hides who has which."""
    names = ((attached(spark, use.name), use.options) for use in uses)
    options_of = {name.sql_name: options for name, options in names if name is not None}
    places: dict[int, set[str]] = {}
    with_options: dict[int, tuple[AttachedName, Mapping[str, str]]] = {}
    for leaf, kind, view in _placed_leaves(plan):
        identifier = leaf.identifier()
        parts = identifier.get().toString().split(".") if identifier.isDefined() else ()
        name = attached(spark, tuple(parts)) if parts else None
        if name is not None:
            table = spark._jvm.System.identityHashCode(leaf.table())
            places.setdefault(table, set()).add(view)
            options = options_of.get(name.sql_name) or _options_in_plan(leaf, kind)
            if options:
                with_options[table] = name, options
    for table, (name, options) in with_options.items():
        if len(places[table]) > 1:
            raise _differing(name, options, {})


def _placed_leaves(plan: Any, view: str = "") -> Iterator[tuple[Any, str, str]]:
    """Yield the relations that may be Python sources with their kind and their outermost view."""
    kind = plan.getClass().getSimpleName()
    if kind in _RELATIONS:
        yield plan, kind, view
    elif kind == "View" and not view:
        view = plan.desc().qualifiedName()
    for each in (*_elements(plan.children()), *_elements(plan.innerChildren())):
        yield from _placed_leaves(each, view)


def _options_in_plan(leaf: Any, kind: str) -> dict[str, str]:
    options = leaf.options() if kind == "DataSourceV2Relation" else leaf.extraOptions()
    return {str(key).lower(): str(text) for key, text in dict(options.asCaseSensitiveMap()).items()}


def _leaves(plan: Any) -> Iterator[tuple[Any, str]]:
    """Yield the relations of a plan that may be Python sources, also in subqueries."""
    # A command that stores the result of a query has the query inside.
    plans = [plan, *_elements(plan.innerChildren())]
    plans += [query for each in plans for query in _elements(each.subqueriesAll())]
    for each in plans:
        for leaf in _elements(each.collectLeaves()):
            kind = leaf.getClass().getSimpleName()
            if kind in _RELATIONS:
                yield leaf, kind


def _elements(sequence: Any) -> list[Any]:
    return [sequence.apply(place) for place in range(sequence.size())]


# -- by the text -----------------------------------------------------------------------------------


def _check_text(spark: Any, text: str, *, is_script: bool) -> None:
    """Refuse different options of a name in a text, where no plan shows the options.

    Spark executes the statements of a script unseen: the name has one set of options in the whole
    script, in its views and in the texts of EXECUTE IMMEDIATE.
    """
    texts = [text]
    if is_script and "IMMEDIATE" in text.upper():
        texts += [unquoted(token) for token in tokens_of(text) if token.is_string]
    options_of: dict[str, Mapping[str, str]] = {}

    def note(name: AttachedName | None, options: Mapping[str, str]) -> None:
        if name is not None and options_of.setdefault(name.sql_name, options) != options:
            raise _differing(name, options_of[name.sql_name], options)

    for part in texts:
        for use in uses_with_options(part):
            note(attached(spark, use.name), use.options)
    if not (options_of or (is_script and has_attached(spark))):
        return
    for parts in dict.fromkeys(parts for part in texts for parts in plain_uses(part)):
        if is_script and is_name_of_view(spark, parts):
            for name, options in _uses_of_view(spark, parts, list(options_of)):
                note(name, options)
        else:
            note(attached(spark, parts), {})


def _uses_of_view(
    spark: Any, parts: Sequence[str], names: Sequence[str]
) -> Iterator[tuple[AttachedName | None, Mapping[str, str]]]:
    """Yield the uses in a view; under Spark Connect, which hides the plan, uses of all `names`."""
    if not has_jvm(spark):
        yield from ((remembered_name(spark, name), {}) for name in names)
        return
    view = run_as_spark(spark, f"TABLE {'.'.join(map(quoted, parts))}")
    for leaf, kind in _leaves(view._jdf.queryExecution().analyzed()):
        if leaf.identifier().isDefined():
            parts = str(leaf.identifier().get().toString()).split(".")
            yield attached(spark, parts), _options_in_plan(leaf, kind)


def _check_combinable(spark: Any, text: str, uses: Sequence[Use], *, is_view: bool) -> None:
    """Refuse options in a view, and in a query of Spark Connect, which others can be combined with.

    The combined plan is analyzed as a whole, and no hook sees all texts.
    """
    if _COMMANDS.match(text) and not is_view:
        return
    for use in uses:
        if (name := attached(spark, use.name)) is not None:
            what = "a view" if is_view else "a query"
            where = "PySpark before 4.3" if has_jvm(spark) else "Spark Connect"
            calls = "".join(
                f".option({key!r}, {_text(key, value)!r})" for key, value in use.options.items()
            )
            raise UnsupportedError(
                f"{what} of '{name.sql_name}' WITH ({_listed(use.options)}): under {where}"
                f" {what} may be combined with others that use the name with other options, and the"
                f" conflict stays hidden; use spark.read{calls}.table('{name.sql_name}'), in SQL as"
                " spark.sql('SELECT ... FROM {frame}', frame=...)"
            )


# -- messages --------------------------------------------------------------------------------------


def _differing(
    name: AttachedName, first: Mapping[str, str], second: Mapping[str, str]
) -> UnsupportedError:
    first_text, second_text = (
        f"({_listed(options)})" if options else "none" for options in (first, second)
    )
    return UnsupportedError(
        f"a statement uses '{name.sql_name}' with different options, {first_text} and"
        f" {second_text}: Spark gives all uses of a name in a statement the options of one of them;"
        f" {_advice(name, second or first)}"
    )


def _advice(name: AttachedName, options: Mapping[str, str]) -> str:
    arguments = ", ".join(f"{key!r}: {_text(key, text)!r}" for key, text in sorted(options.items()))
    second_name = name.sql_name.rpartition(".")[2] + "_2"
    return (
        "give the table a second name with its own options: streamhouse.attach(spark,"
        f" '{name.connection.name}', '{second_name}', **{{{arguments}}})"
    )


def _listed(options: Mapping[str, str]) -> str:
    return ", ".join(f"{key} = '{_text(key, text)}'" for key, text in sorted(options.items()))


def _text(key: str, text: str) -> str:
    return "***" if key.lower() in _SECRETS else text
