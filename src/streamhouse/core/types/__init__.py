"""The types of columns: one class for each logical type, with the type's forms as methods."""
