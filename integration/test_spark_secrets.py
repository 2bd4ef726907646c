"""A token given to Spark is in nothing that Spark shows: plans, errors, progress."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from integration.spark_world import EVENTS, event_rows
from streamhouse.api.client import StreamhouseClient
from tests.support.certificates import make_certificates
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SECRET = "s3cret-t0ken-of-spark"


def _plans(frame: DataFrame) -> str:
    """Everything that explain and the query execution listener's page may show."""
    execution = frame._jdf.queryExecution()  # type: ignore[operator]
    return str(execution.toString()) + str(execution.stringWithStats())


def test_over_tls_with_a_token_rows_come_and_the_token_is_nowhere(
    spark: SparkSession, tmp_path: Path
) -> None:
    made = make_certificates(tmp_path / "tls", host="IP:127.0.0.1")
    token_file = tmp_path / "token"
    token_file.write_text(SECRET)
    token_file.chmod(0o600)
    arguments = ("--token-file", token_file, "--tls-cert", made.certificate, "--tls-key", made.key)
    with (
        ServiceProcess(tmp_path / "data", *map(str, arguments)) as service,
        StreamhouseClient(service.endpoint, token=SECRET, ca_file=str(made.ca)) as client,
    ):
        client.create_table("t", EVENTS)
        client.append("t", event_rows(0, 10))
        options = {"endpoint": service.endpoint, "token": SECRET, "tls.ca": str(made.ca)}

        frame = spark.read.format("streamhouse").options(**options).load("default.t")
        assert frame.count() == 10
        assert SECRET not in _plans(frame.filter("id > 3").select("id"))

        written = frame.write.format("streamhouse").options(**options).mode("append")
        written.save("default.t")
        assert (
            frame.sparkSession.read.format("streamhouse")
            .options(**options)
            .load("default.t")
            .count()
            == 20
        )

        with pytest.raises(Exception, match="no column 'nope'") as wrong:
            spark.read.format("streamhouse").options(**options, where="nope = 1").load(
                "default.t"
            ).collect()
        assert SECRET not in str(wrong.value)

        stream = spark.readStream.format("streamhouse").options(**options).load("default.t")
        query = stream.writeStream.format("noop").trigger(availableNow=True).start()
        query.awaitTermination()
        assert SECRET not in str(query.lastProgress)
        assert SECRET not in query._jsq.explainInternal(True)
        assert SECRET not in service.log_text()
