"""Tables as running things: their logs, lake state, waiters, retention and tiering rounds."""
