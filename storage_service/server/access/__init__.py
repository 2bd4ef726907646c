"""Who may do what: `AccessControl`, `ForeignRequests`, and `Grants`, which has the tokens."""
