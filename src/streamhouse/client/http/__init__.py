"""Requests and answers over HTTP; the door is `transport.HttpTransport`."""
