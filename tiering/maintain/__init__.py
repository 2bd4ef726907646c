"""Maintenance of lake tables: which steps are due, the cost of each, and the steps themselves.

`_maintenance.Maintainer` runs the steps; `_maintenance_policy` has the settings of a table.
"""
