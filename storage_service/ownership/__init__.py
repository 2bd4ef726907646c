"""Who owns a data directory: its journal, its shards, the roles of its processes."""
