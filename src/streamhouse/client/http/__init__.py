"""Requests and answers on the wire; the door is `transport.HttpTransport`."""
