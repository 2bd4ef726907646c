"""The tiering worker: claims tables, runs their rounds on threads or on Spark.

The doors are `service.TieringService`, `embedded` for one inside the storage service, `job` for one
of its own, and `maintain_job` for maintenance on demand.
"""
