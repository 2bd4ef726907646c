"""The positions of tables and of their readers."""
