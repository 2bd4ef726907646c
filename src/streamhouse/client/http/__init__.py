"""Requests and answers over HTTP; the entry is `transport.HttpTransport`."""
