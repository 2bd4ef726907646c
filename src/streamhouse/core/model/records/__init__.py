"""The relation of Kafka's records to rows, and the sequences of producers in log frames."""
