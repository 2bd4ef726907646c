"""Positions: where tables stand, and where their readers do."""
