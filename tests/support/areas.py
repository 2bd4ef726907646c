"""Which test files are an area's, as users of the code call it: `make test AREA=kafka`.

A pattern is of the file's path from the repository's root; its `*` goes through folders. A file may
be of several areas.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

AREAS: Final[dict[str, tuple[str, ...]]] = {
    "catalog": (
        "*catalog*", "*iceberg_route*", "*hostile_lake_tables*", "*hostile_tables*", "*/live/*",
    ),
    "cdc": ("*cdc_*", "*_cdc*", "*debezium*"),
    "cli": ("*/cli/*", "*_command*", "*import_progress*", "*check*", "*backup*"),
    "client": (
        "*/client/*", "*client*", "*producer*", "*_calls*", "*mistakes*", "*unread_answers*",
        "*forms_of_rows*", "*large_rows*", "*rows_at_once*", "*text_*", "*json_rows*", "*/wire/*",
    ),
    "journal": (
        "*journal*", "*/ownership/*", "*takeover*", "*standby*", "*failover*", "*copied_directory*",
        "*lock_out*", "*clock*", "*two_histories*",
    ),
    "kafka": ("*kafka*", "*consumer_groups*", "*producer_sequences*", "*schema_registry*"),
    "keys": ("*/keys/*", "*/kv/*", "*key*", "*kv_*", "*upsert*", "*lookup*", "*merges_and_kills*"),
    "lake": (
        "*/lake/*", "*lake*", "*iceberg*", "*adopt*", "*outside_c*", "*maintenance*", "*landing*",
        "*side_table*", "*name_mapping*", "*layout*",
    ),
    "log": ("*/log/*", "*_log*", "*log_*", "*crashes*", "*disk*", "*damage*", "*retention*"),
    "names": (
        "*/names/*", "*statement*", "*shared_options*", "*application_versions*", "*option_*",
    ),
    "read": (
        "*/reading/*", "*/query/*", "*/changes/*", "*/format/*", "*read*",
        "*predicate*", "*quer*", "*planning*", "*lookup*", "*join*", "*aggregates*", "*since_*",
        "*zone*",
    ),
    "schema": (
        "*schema*", "*/core/*", "*named_columns*", "*dropped_not_null*", "*nested_fields*",
        "*decimal*", "*extreme_values*", "*hostile_values*", "*types*", "*column_replacement*",
    ),
    "security": (
        "*/access/*", "*grants*", "*secret*", "*certificates*", "*tls*", "*hostile_*", "*attack*",
        "*token*",
    ),
    "server": (
        "*/server/*", "*/upkeep/*", "*/traces/*", "*status*", "*serve_command*", "*loop_lag*",
        "*waiting_clients*", "*tests/service/*", "*config*", "*storage_service/test_*",
    ),
    "shards": ("*shard*", "*_moves*", "*moved_*", "*move_set*", "*followed_directory*"),
    "spark": ("*spark*", "*/connector/*"),
    "stream": (
        "*/stream/*", "*/following/*", "*stream*", "*subscri*", "*exactly_once*", "*consumers*",
        "*consumer_routes*", "*speculation*",
    ),
    "tables": ("*/engine/*", "*/directory/*", "*tables*", "*alter*", "*recreated*", "*made_*"),
    "tiering": ("*tiering*", "*tiered*", "*union_read*"),
    "transactions": ("*transaction*", "*linked_commits*", "*commit*", "*read_conflicts*"),
    "write": (
        "*/write/*", "*write*", "*overwrit*", "*rejected_rows*", "*conditional*", "*row_expiry*",
        "*assignment*", "*produce*", "*sequence*",
    ),
}  # fmt: skip


def is_of(area: str, path: str) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in AREAS[area])
