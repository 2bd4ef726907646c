"""What a record of Kafka is to a row of a table, and the sequence of a producer in its frames."""
