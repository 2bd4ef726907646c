"""Ranges of the log as files of the lake: rounds commit the files, live cuts only show them."""
