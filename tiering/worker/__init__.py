"""The tiering worker: claims tables, runs their rounds on threads or on Spark.

`_service.TieringService` is the worker. `embedded` runs a worker inside the storage service, `job`
runs a worker as a process of its own, and `maintain_job` runs maintenance on demand.
"""
