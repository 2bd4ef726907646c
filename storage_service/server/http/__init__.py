"""Connections, requests and answers, and the bounds on their number, time and memory."""
