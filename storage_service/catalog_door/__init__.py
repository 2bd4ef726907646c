"""The door of the Iceberg REST catalog: requests below `/iceberg`, over HTTP.

`catalog_door.py` is the door; `rest_catalog/` has the protocol without a network.
"""
