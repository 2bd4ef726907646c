"""A Kafka producer writes clicks, and Spark counts them as they come: a topic is a table.

pip install 'pyspark-streamhouse[all,kafka]' confluent-kafka
streamhouse serve --data-dir ./data --kafka-port 9092
python examples/kafka_stream.py
"""

from __future__ import annotations

import json
import os

from confluent_kafka import Producer
from pyspark.sql import SparkSession

import streamhouse

spark = SparkSession.builder.appName("clicks").getOrCreate()
streamhouse.register(spark)
spark.sql("CREATE TABLE clicks (person STRING, page STRING, ms BIGINT) USING streamhouse")

counts = spark.readStream.format("streamhouse").load("clicks").groupBy("page").count()
query = counts.writeStream.format("memory").queryName("pages").outputMode("complete").start()

brokers = os.environ.get("KAFKA_BROKERS", "127.0.0.1:9092")
producer = Producer({"bootstrap.servers": brokers, "enable.idempotence": True})
for number in range(1, 1_001):
    click = {"person": f"p{number % 7}", "page": f"/{number % 3}", "ms": number}
    producer.produce("clicks", json.dumps(click))
    if number % 500 == 0:  # look at what Spark has counted so far
        producer.flush()
        query.processAllAvailable()
        spark.table("pages").orderBy("page").show()
query.stop()
