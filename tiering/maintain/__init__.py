"""Maintenance of lake tables: what is due, what it costs, doing it without harm to a round."""
