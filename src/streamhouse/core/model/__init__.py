"""Values shared by every part: no file, no network, no clock.

- a table: `table`, `schema`, `schema_change`, `partitioning`, `properties`, `merge_engine`
- its positions: `offsets`, `table_state`, `transaction`
- its rows: `conform` (rows that fit the schema), `bucketing`, `changelog`, `calendar`
- its lake tables: the room `lake/`
- `units` reads texts of people, `sorted_values` is a set of integers as an array
"""
