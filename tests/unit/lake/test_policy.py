"""What a lake table may say: properties, names and paths."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pyiceberg
import pytest

from streamhouse.core.errors import (
    ForbiddenError,
    InvalidNameError,
    InvalidRequestError,
)
from streamhouse.core.model.lake.facts import (
    LAKE_PATHS_PROPERTY,
    LAKE_SYSTEM_FIELDS,
    SERVICE_ID_PROPERTY,
)
from streamhouse.lake._policy import (
    KEPT_PROPERTIES,
    REFUSED_PROPERTIES,
    Warehouse,
    bounds_of,
    check_lake_name,
    check_properties,
    kept_properties,
    location_of,
    place_of,
    places_of,
    why_refused,
)

# -- properties ----------------------------------------------------------------------------------

# Where pyiceberg keeps the names of properties.
_SOURCES = ("io/*.py", "catalog/**/*.py", "table/__init__.py", "table/locations.py", "utils/*.py")
# Constants of these files that are words of a format, a protocol or a value.
_NO_PROPERTIES = frozenset(
    (
        *(".pyiceberg.yaml", "/v1/{prefix}", ":", "ACTIVE", "Authorization", "Bearer", "CONNECT"),
        *("DELETE", "DO_NOT_UPDATE_STATS", "EXTERNAL_TABLE", "GET", "HEAD", "ICEBERG", "Item"),
        *("NAMESPACE", "OPTIONS", "PATCH", "PAY_PER_REQUEST", "POST", "PUT", "PYICEBERG_HOME"),
        *("TABLE", "TRACE", "adaptive", "aws:s3tables", "bigquery", "catalog", "copy-on-write"),
        *("counts", "created_at", "custom", "default", "doc", "dynamodb", "element", "false"),
        *("full", "glue", "gzip", "hive", "iceberg", "identifier", "in-memory", "legacy"),
        *("manifest", "manifest list", "merge-on-read", "metadata", "namespace", "none", "p."),
        *("namespace-identifier", "parquet", "previous metadata", "pyiceberg_", "rest"),
        *("serializable", "server", "sql", "standard", "table", "true", "truncate"),
        *("truncate(16)", "uncompressed", "updated_at", "v", "v1/aws/s3/sign", "value"),
        *("vended-credentials", "view", "zstd", "iceberg.field.current", "iceberg.field.id"),
        *("iceberg.field.optional", r"^truncate\((\d+)\)$"),
        "https://storage.azure.com/.default",
        "urn:ietf:params:oauth:grant-type:token-exchange",
        "pyiceberg.io.fsspec.FsspecFileIO",
        "pyiceberg.io.pyarrow.PyArrowFileIO",
        "org.apache.iceberg.mr.hive.HiveIcebergInputFormat",
        "org.apache.iceberg.mr.hive.HiveIcebergOutputFormat",
        "org.apache.iceberg.mr.hive.HiveIcebergSerDe",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    )
)


def _constants() -> Iterator[tuple[str, str]]:
    """Every text that pyiceberg has a name in capitals for, and where."""
    root = Path(pyiceberg.__file__).parent
    for path in sorted({path for pattern in _SOURCES for path in root.glob(pattern)}):
        for scope in ast.walk(ast.parse(path.read_text())):
            if not isinstance(scope, ast.Module | ast.ClassDef):
                continue
            for statement in scope.body:
                if isinstance(statement, ast.Assign):
                    name, value = statement.targets[0], statement.value
                elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                    name, value = statement.target, statement.value
                else:
                    continue
                is_constant = isinstance(name, ast.Name) and name.id == name.id.upper()
                if is_constant and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value, f"{path.relative_to(root)}: {ast.unparse(name)}"


def test_every_property_that_pyiceberg_knows_is_classified() -> None:
    """A new version with a new property fails here: say in policy.py what the property is."""
    found = dict(_constants())
    assert len(found) > 150, "the names have moved"

    unknown = {
        name: where
        for name, where in found.items()
        if name not in _NO_PROPERTIES
        and name not in KEPT_PROPERTIES
        and name not in REFUSED_PROPERTIES
        # A room such as `s3.` is classified as a whole.
        and not (name.partition(".")[1] and why_refused(name))
    }

    assert not unknown


def test_no_property_is_both_kept_and_refused() -> None:
    assert not KEPT_PROPERTIES & REFUSED_PROPERTIES.keys()


@pytest.mark.parametrize(
    "name",
    [
        "write.py-location-provider.impl",
        "write.location-provider.impl",
        "py-io-impl",
        "Py-IO-Impl",
        "py-catalog-impl",
        "io-impl",
        "io.Impl",
        "my.fancy.impl",
        "rowIdProviderClass",
        "s3.endpoint",
        "S3.Endpoint",
        "s3.session-token",
        "s3.signer.uri",
        "client.region",
        "gcs.service.host",
        "adls.account-host",
        "hdfs.host",
        "hf.endpoint",
        "write.data.path",
        "write.metadata.path",
        "write.object-storage.path",
        "write.folder-storage.path",
        "uri",
        "token",
        "credential",
        "header.Authorization",
        "rest.sigv4-enabled",
        "encryption.key-id",
        "kms-key",
        "some.access.key",
        "jdbc.password",
        "x" * 1_001,
        LAKE_PATHS_PROPERTY,
        "streamhouse.catalog-timeout-ms",
    ],
)
def test_what_chooses_code_places_stores_or_credentials_is_refused_by_name(name: str) -> None:
    with pytest.raises(ForbiddenError, match=re.escape(f"property '{name[:200]}' must not be set")):
        check_properties("lake table 'db.t'", {"owner": "me", name: "x"})
    assert kept_properties({"owner": "me", name: "x"}) == ({"owner": "me"}, (name,))


@pytest.mark.parametrize(
    "name",
    [
        *sorted(KEPT_PROPERTIES),
        "write.distribution-mode",
        "write.merge.mode",
        "write.wap.enabled",
        "write.parquet.bloom-filter-enabled.column.path",
        "write.metadata.metrics.column.secret_token",
        "read.split.planning-lookback",
        "compatibility.snapshot-id-inheritance.enabled",
        "history.expire.max-ref-age-ms",
        "flink.max-continuous-empty-commits",
        "option.path",
        "transient_lastDdlTime",
        "team",
        "pii.level",
        "primary-key",
        SERVICE_ID_PROPERTY,
        "streamhouse.table",
        *(f"write.metadata.metrics.column.{field.name}" for field in LAKE_SYSTEM_FIELDS),
    ],
)
def test_what_tunes_or_labels_a_table_is_kept(name: str) -> None:
    value = next(
        v for v in ("x", "1", "true", "full") if kept_properties({name: v}) == ({name: v}, ())
    )
    check_properties("lake table 'db.t'", {name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("write.metadata.previous-versions-max", "many"),
        ("write.metadata.previous-versions-max", "9" * 5_000),
        ("commit.manifest.target-size-bytes", "8MB"),
        ("write.metadata.delete-after-commit.enabled", "perhaps"),
        ("write.metadata.metrics.default", "everything"),
        ("write.metadata.metrics.column.__offset", "truncate(0)"),
    ],
)
def test_a_value_that_would_stop_every_commit_is_refused_and_dropped(name: str, value: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(f"property '{name}' must be")):
        check_properties("lake table 'db.t'", {name: value})
    assert kept_properties({name: value}) == ({}, (name,))


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t", "db", "t$changelog", "t__dropped_1", "a b", "a.b", "größe"])
def test_a_name_of_one_folder_is_fine(name: str) -> None:
    check_lake_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "...", "a/b", "../t", "a\\b", "a%2fb", "t?x", "t#x", "a\0", "a\nb"),
        *(" t", "t ", "x" * 256),
    ],
)
def test_a_name_that_is_no_folder_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(InvalidNameError):
        check_lake_name(name)


# -- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("file:///wh/t", "/wh/t"),
        ("file:/wh/t", "/wh//t/"),
        ("file://localhost/wh/t", "/wh/t"),
        ("s3://b/wh/t", "s3a://b//wh/t/"),
        ("s3n://b/wh/t", "s3://b/wh/t"),
        ("abfs://c@acc.dfs/t", "abfss://c@acc.dfs/t"),
    ],
)
def test_ways_to_write_one_place_are_one_place(left: str, right: str) -> None:
    assert place_of(left) == place_of(right)


@pytest.mark.parametrize(
    "uri",
    [
        "file:///wh/../etc",
        "/wh/./../etc",
        "/wh/%2e%2e/etc",
        "/wh/%252e%252E/etc",
        "file://host/etc",
        "FILE:///etc",
        "s3:/b/x",
        "s3:b/x",
        "s3://",
        "s3://b@evil/x",
        "s3://b:80/x",
        "/wh/a\nb",
        "/wh/a\0",
        "hdfs:/x",
    ],
)
def test_a_path_that_can_lead_elsewhere_is_no_place(uri: str) -> None:
    with pytest.raises(ForbiddenError):
        place_of(uri)


WAREHOUSE = Warehouse.parse("file:///wh")


@pytest.mark.parametrize(
    "uri",
    [
        "file:///wh/db/t/data/a.parquet",
        "/wh/db/t/data/a.parquet",
        "file:/wh/db/t//data/a.parquet",
        "file:///wh/db/t/data/x=..%2F..%2Fetc/a.parquet",
        "file:///wh/db/t/data/x=a b/ü\u3000.parquet",
        "file:///wh/db/t/data/..a/.hidden",
    ],
)
def test_a_file_below_the_location_is_the_tables(uri: str) -> None:
    assert bounds_of("file:///wh/db/t", warehouse=WAREHOUSE, extra_places=()).has(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "file:///wh/db/t",
        "file:///wh/db/t/",
        "file:///wh/db/tt/a",
        "file:///wh/db/t/../u/a",
        "file:///wh/db/t/data/..",
        "file:///wh/db/t/%2e%2e/u/a",
        "file:///wh/db/t/%2E./u/a",
        "file:///wh/db/t/a\n",
        "file:///wh/db/u/a",
        "/etc/passwd",
        "s3://wh/db/t/a",
        "http://wh/db/t/a",
        "",
    ],
)
def test_a_file_elsewhere_is_not_the_tables(uri: str) -> None:
    bounds = bounds_of("file:///wh/db/t", warehouse=WAREHOUSE, extra_places=())

    assert not bounds.has(uri)
    with pytest.raises(ForbiddenError, match=LAKE_PATHS_PROPERTY):
        bounds.check("lake table 'db.t'", uri)


def test_the_operator_may_name_more_places() -> None:
    extra_places = places_of("s3://old/tables, file:///srv/hive")
    bounds = bounds_of("file:///wh/db/t", warehouse=WAREHOUSE, extra_places=extra_places)

    assert bounds.has("s3a://old/tables/x/y.parquet")
    assert bounds.has("/srv/hive/x")
    assert not bounds.has("s3://old/other/x")


@pytest.mark.parametrize(
    ("location", "is_believed"),
    [
        ("file:///elsewhere/t", True),
        ("s3://bucket/t", True),
        ("hdfs://attacker:9000/t", False),
        ("abfs://c@attacker/t", False),
        ("file:///wh/victim/data/f.parquet#", False),
        ("s3://b/t?x", False),
        ("file:///", False),
        ("__import__('os').system('id')", True),
    ],
)
def test_a_location_that_names_a_host_needs_the_operators_word(
    location: str, *, is_believed: bool
) -> None:
    bounds = bounds_of(location, warehouse=WAREHOUSE, extra_places=())

    assert bounds.has(f"{location}/data/a.parquet") is is_believed


def test_a_host_that_is_the_warehouses_is_believed() -> None:
    warehouse = Warehouse.parse("hdfs://namenode:9000/wh")

    assert bounds_of("hdfs://namenode:9000/other/t", warehouse=warehouse, extra_places=()).has(
        "hdfs://namenode:9000/other/t/a"
    )


def test_how_the_operator_writes_the_warehouse_is_his_affair() -> None:
    warehouse = Warehouse.parse("file:///srv/x/../my%20lake/")
    assert warehouse is not None

    location = "file:///srv/x/../my%20lake/db/t"

    assert location_of(location, warehouse, is_new=True).segments == ("srv", "my%20lake", "db", "t")
    bounds = bounds_of(location, warehouse=warehouse, extra_places=())
    assert bounds.has(f"{location}/data/a.parquet")
    assert not bounds.has(f"{location}/../u/a.parquet")
    with pytest.raises(ForbiddenError):
        location_of(f"{location}/../u", warehouse, is_new=True)
    with pytest.raises(ForbiddenError):
        location_of(f"{location}%2e", warehouse, is_new=True)


def test_links_are_followed_where_files_are_deleted(tmp_path: Path) -> None:
    for folder in ("wh/db/t/data", "wh/db/u/data"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "wh/db/u/data/f").write_text("theirs")
    (tmp_path / "wh/db/t/data/own").write_text("ours")
    (tmp_path / "wh/db/t/link").symlink_to(tmp_path / "wh/db/u")
    (tmp_path / "wh/db/t/data/f").symlink_to(tmp_path / "wh/db/u/data/f")
    location = f"file://{tmp_path}/wh/db/t"
    bounds = bounds_of(location, warehouse=Warehouse.parse(f"{tmp_path}/wh"), extra_places=())

    assert bounds.really_has(f"{location}/data/own", folders={})
    assert not bounds.really_has(f"{location}/link/data/f", folders={})
    assert not bounds.really_has(f"{location}/data/f", folders={})


def test_a_warehouse_by_name_is_no_place() -> None:
    assert Warehouse.parse("prod") is None
    assert Warehouse.parse(None) is None
