"""What an operator does to a data directory besides serving it: check, dump, back up, restore."""
