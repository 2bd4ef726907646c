"""The Iceberg REST catalog of the service, over any catalog: the protocol, and nothing of Iceberg.

The door is `rest_api.RestCatalogApi`, loaded when first used.
"""
