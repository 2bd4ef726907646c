"""An operator's work on a data directory besides serving: check, dump, back up, restore."""
