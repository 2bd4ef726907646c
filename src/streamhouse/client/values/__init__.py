"""What callers give, in the forms that Python people have, as what the rest of the client takes.

`forms.taken` is the door for rows: Arrow, anything that lends its columns to Arrow, dicts.
`python_rows` makes dicts the columns of a table, `schema_forms` and `ddl` make what describes a
table an Arrow schema, `arguments` checks names, offsets and numbers.
"""
