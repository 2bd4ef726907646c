"""Who may do what: tokens, grants, and what each route needs."""
