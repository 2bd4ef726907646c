"""What others may do to a service's own lake tables through our catalog; adoption of a lake table.

The doors are `table_commits.TableCommits`, `catalog_tables.CatalogTables` and `adoptable_lake`;
`live_tables` says what they must know of the service.
"""
