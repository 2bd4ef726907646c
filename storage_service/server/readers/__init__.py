"""Readers: processes beside the owner that answer reads by key of connections handed to them.

Read in this order: `_board.py` (what is published), `_messages.py` (what the processes say),
`_readers.py` (the owner's side), `_reader_process.py` and `_reader_app.py` (a reader's side).
"""
