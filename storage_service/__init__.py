"""The storage service: logs and primary key tables behind HTTP.

The package is imported on every Spark executor and therefore imports nothing.
"""
