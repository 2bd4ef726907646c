"""Requests and answers of Kafka's protocol as entities of kio, a class for message and version.

kio reads and writes the entities. Messages that would exhaust kio's memory are refused first.
`requests.py` is the entry. `answers.py` makes an answer of any version from the same values.
"""
