"""Tables as running things; each room of theirs says in its first line what it is for."""
