"""Connections, requests and answers, and the bounds on their number, time and memory.

`HttpExchange` is one request and its answer, the interface for all code above this folder.
"""
