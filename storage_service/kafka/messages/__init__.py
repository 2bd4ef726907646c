"""Requests and answers of Kafka's protocol as entities of kio, one class a message and version.

kio reads and writes them. What it would not survive is refused before it looks: begin at
`requests.py`. `answers.py` makes an answer of any version from one set of values.
"""
