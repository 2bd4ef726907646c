"""SQL names of tables: the effects of statements on attached names. The entry is `_hooks`."""
