"""Values of one type as values of another, whole columns at a time.

`conform` gives rows the columns of a table. `lossless` says which values are the same ones in a
table's type, and makes them that. `nested` walks lists, maps and structs for whoever converts what
is in them.
"""
