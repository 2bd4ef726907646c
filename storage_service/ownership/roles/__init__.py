"""Whose the data are: the roles of a process with a journal; begin at `role.py`."""
