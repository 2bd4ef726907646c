"""The object stores that a journal can lie in: directory or bucket, opened and tried; begin at
`object_store.py`."""
