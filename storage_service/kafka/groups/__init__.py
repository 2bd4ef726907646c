"""Consumer groups of Kafka's classic protocol, as values and decisions without I/O.

`coordinator.py` is the entry. `group.py` is one group, with the states of Apache Kafka's
GroupCoordinator and the same error code for each call in each state.
"""
