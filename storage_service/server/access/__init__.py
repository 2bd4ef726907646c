"""Access control: `AccessControl`, `ForeignRequests`, and `Grants` with the tokens."""
