"""Tables as running things. The door is `manager`: it owns all tables of one data directory.

From below: `directory/` has the files that say what there is; `open_table` is one table, `keys/`
one with a primary key; `tiering_desk/`, `transactions/` and `upkeep/` are what is done to tables;
`opener` makes them. What they all share is made once: `runtime`.
"""
