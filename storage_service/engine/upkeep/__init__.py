"""What the service does by itself as time passes: retention, expiry, the disk budget."""
