"""The storage service over HTTP: routes, limits, authentication, metrics."""
