"""What every program shares: the model, values, texts, the wire, errors. No I/O of its own."""
