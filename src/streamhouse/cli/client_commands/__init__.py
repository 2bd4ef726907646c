"""Commands of clients: each calls a running service; each module has one `command`."""
