"""Values of one type as values of another, whole columns at a time.

`conform` gives rows the columns of a table. `lossless` casts values to a table's type without a
loss. `nested` applies a conversion inside of lists, maps and structs.
"""
