"""`streamhouse check`: verifies every acknowledged row."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
from rich.table import Table

from streamhouse.cli.output import open_console
from streamhouse.cli.progress_bar import ProgressBar, quiet_option
from streamhouse.core.errors import (
    StorageFailedError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.core.model.lake.facts import LakeCatalog, LakeState
from streamhouse.core.model.table import TableInfo
from streamhouse.core.secret_sources import catalog_properties_from
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.config_settings import DEFAULT_CATALOG_NAME
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.operations.check_directory import LakeCheck, check_directory
from streamhouse.storage_service.operations.check_journal import JournalReport, check_journal
from streamhouse.storage_service.operations.check_service import ServiceReport, check_service
from streamhouse.storage_service.operations.findings import CheckReport, Finding, TableFacts
from streamhouse.storage_service.operations.rebuild_service_file import (
    rebuild_service_file as rebuild,
)
from streamhouse.storage_service.ownership.journal.names import ShardNames
from streamhouse.storage_service.ownership.journal.restore.journal_file import (
    refuse_without_journal,
)
from streamhouse.storage_service.ownership.journal.store.object_store import ObjectStoreError
from streamhouse.storage_service.ownership.journal.store.store_opening import open_store

__all__ = ["command"]

_DAMAGED: Final = 1
_NOT_CHECKED: Final = 2


@click.command("check")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="A data directory that no service uses, or a backup.",
)
@click.option(
    "--journal",
    "journal_url",
    metavar="URL",
    help="A journal, as given to serve, instead of a data directory; its service may run.",
)
@click.option(
    "--shard", metavar="NAME", help="Only this shard of the journal; default: all shards."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--no-lake", is_flag=True, help="Do not open the Iceberg catalog.")
@click.option(
    "--rebuild-service-file",
    is_flag=True,
    help="Instead of checking, make a lost service.json anew from what the tables say.",
)
@click.option("--lake-rows", is_flag=True, help="Also read every row of the lake.")
@click.option("--catalog", "catalog_name", default=DEFAULT_CATALOG_NAME, show_default=True,
              help="Name of the Iceberg catalog, as given to serve.")  # fmt: skip
@click.option("--catalog-property", "catalog_properties", multiple=True, metavar="KEY=VALUE",
              help="pyiceberg catalog property, as given to serve.")  # fmt: skip
@quiet_option
def command(
    *,
    data_dir: Path | None,
    journal_url: str | None,
    shard: str | None,
    as_json: bool,
    no_lake: bool,
    rebuild_service_file: bool,
    lake_rows: bool,
    catalog_name: str,
    catalog_properties: tuple[str, ...],
    is_quiet: bool,
) -> None:
    """Verify a data directory, reading only.

    Checks every checksum and every row of the logs, the rows by key against their changelog, and
    the lake against the offsets that are registered as tiered. Exit code 0: sound (the next start
    mends the causes of warnings); 1: acknowledged data is damaged; 2: not checked, because a
    service uses the directory or it is no data directory.

    Of a journal: every epoch has its seal, and the checkpoints and the later operations are whole,
    to the last byte. Without --shard every shard is checked, and the directory of tables against
    the shards.
    """
    if (data_dir is None) == (journal_url is None):
        raise click.UsageError("give either --data-dir or --journal")
    if journal_url is not None:
        _check_journal(journal_url, shard, catalog_properties, as_json=as_json, is_quiet=is_quiet)
        return
    assert data_dir is not None
    if rebuild_service_file:
        _rebuild_service_file(data_dir)
        return
    config = ServiceConfig(
        data_dir=data_dir,
        catalog_name=catalog_name,
        catalog_properties=catalog_properties_from(catalog_properties),
    )
    lake_check = None if no_lake else _lake_check(config.lake_catalog(), read_rows=lake_rows)
    try:
        with ProgressBar("checking", is_quiet=is_quiet) as progress:
            report = check_directory(data_dir, lake_check=lake_check, progress=progress)
        if not no_lake:
            _check_catalog(config.lake_catalog(), report)
    except StreamhouseError as error:
        click.echo(f"streamhouse: {error}", err=True)
        sys.exit(_NOT_CHECKED)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        _print(report)
    if not report.is_sound:
        sys.exit(_DAMAGED)


def _check_journal(
    url: str,
    shard: str | None,
    catalog_properties: tuple[str, ...],
    *,
    as_json: bool,
    is_quiet: bool,
) -> None:
    properties = catalog_properties_from(catalog_properties)
    store = open_store(url, properties={k: v for k, v in properties.items() if k.startswith("s3.")})
    report: JournalReport | ServiceReport
    try:
        with ProgressBar("checking", is_quiet=is_quiet) as progress:
            if shard is None:
                report = check_service(store, progress=progress)
            else:
                report = check_journal(store, ShardNames(shard), progress=progress)
    except (ObjectStoreError, StorageFailedError, UnavailableError) as error:
        click.echo(f"streamhouse: {url} cannot be read: {error}", err=True)
        sys.exit(_NOT_CHECKED)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    elif isinstance(report, ServiceReport):
        for journal in report.shards:
            _print_journal(journal)
        _print_findings(report.findings)
        click.echo(
            f"the service in {report.url} is {_verdict(report.is_sound)}: {len(report.shards)}"
            f" shards, {report.names:,} names in its directory,"
            f" {len(report.findings)} findings besides those of the journals"
        )
    else:
        _print_journal(report)
    if not report.is_sound:
        sys.exit(_DAMAGED)


def _print_journal(report: JournalReport) -> None:
    _print_findings(report.findings)
    click.echo(
        f"the journal {report.url} of shard '{report.shard}' is {_verdict(report.is_sound)}:"
        f" {report.epochs:,} epochs, {report.checkpoints} checkpoints,"
        f" {report.packs_bytes:,} bytes in packs,"
        f" {report.operations:,} operations after the last, {len(report.findings)} findings"
    )


def _print_findings(findings: Sequence[Finding]) -> None:
    for finding in findings:
        click.echo(f"{finding.severity}: {finding.where}: {finding.problem}")


def _verdict(is_sound: bool) -> str:
    return "sound" if is_sound else "DAMAGED"


def _rebuild_service_file(data_dir: Path) -> None:
    directory = DataDirectory.open(data_dir)
    try:
        refuse_without_journal(directory.path)
        paths = rebuild(directory)
    finally:
        directory.close()
    click.echo(
        f"{directory.service_file} was rebuilt, with {len(paths)} tables: {', '.join(paths)};"
        " databases without tables are gone"
    )


def _lake_check(catalog: LakeCatalog, *, read_rows: bool) -> LakeCheck:
    def check(table: TableInfo, lake: LakeState, facts: TableFacts, report: CheckReport) -> None:
        from streamhouse.reading.lake_only.lake_check import lake_problems  # noqa: PLC0415 - pyiceberg is for tables with a lake

        ends = {bucket.bucket: bucket.log_end_offset for bucket in facts.buckets}
        for problem in lake_problems(
            catalog,
            table,
            lake,
            log_ends=ends,
            key_offsets=facts.lake_offsets,
            fingerprints=facts.fingerprints,
            read_rows=read_rows,
        ):
            report.error(f"lake of table '{table.path}'", problem)

    return check


def _check_catalog(catalog: LakeCatalog, report: CheckReport) -> None:
    from streamhouse.reading.lake_only.lake_check import catalog_problem  # noqa: PLC0415 - the module imports pyiceberg

    if problem := catalog_problem(catalog):
        report.error("lake catalog", problem)


def _print(report: CheckReport) -> None:
    overview = Table(title=report.data_dir)
    overview.add_column("table", no_wrap=True)
    for heading in ("bucket", "segments", "batches", "log rows", "log", "tiered", "rows by key"):
        overview.add_column(heading, justify="right")
    for table in report.tables:
        for facts in table.buckets:
            overview.add_row(
                table.path,
                str(facts.bucket),
                f"{facts.segments:,}",
                f"{facts.frames:,}",
                f"{facts.rows:,}",
                f"{facts.log_start_offset:,} to {facts.log_end_offset:,}",
                f"{facts.tiered_offset:,}",
                "" if facts.key_count is None else f"{facts.key_count:,}",
            )
    open_console().print(overview)
    _print_findings(report.findings)
    verdict = _verdict(report.is_sound)
    click.echo(f"{report.data_dir} is {verdict}: {len(report.findings)} findings")
