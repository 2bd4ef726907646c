"""Commands that speak to a running service, as any client does; each module has one `command`."""
