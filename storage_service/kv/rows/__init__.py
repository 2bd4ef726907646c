"""Keys and rows as bytes: encoding, hashing, ordering; many at once and one alone."""
