"""Rules for other engines' changes to the service's lake tables; adoption of a lake table.

`table_commits.TableCommits` and `catalog_tables.CatalogTables` apply the rules, `adoptable_lake`
adopts; `served_tables` has the facts about the service.
"""
