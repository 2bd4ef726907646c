"""The tiering worker: claims tables, runs their rounds on threads or on Spark, keeps its lease."""
