"""Commits to lake tables: a round's snapshot, expiry, and the files nobody needs."""
