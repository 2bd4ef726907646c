"""Maintenance of lake tables: what is due, what it costs, doing it without harm to a round.

The door is `maintenance.Maintainer`; `maintenance_policy` says what a table wants.
"""
