"""Tables as running things: their rooms are the directory, keys, transactions, tiering desk, upkeep."""
