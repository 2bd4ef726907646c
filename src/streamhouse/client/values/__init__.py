"""Arguments of callers, in Python's many forms, converted for the rest of the client.

`forms.normalized_rows` is the entry for rows: Arrow data, objects with an Arrow export, dicts.
`python_rows` converts dicts into columns of a table, `schema_forms` and `ddl` convert a description
of columns into an Arrow schema, `arguments` checks names, offsets and numbers.
"""
