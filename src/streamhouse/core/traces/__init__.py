"""OpenTelemetry traces with the stages of one call.

The entries are `opened_spans` for a process that exports spans, `stage_ended` for code with a stage
to report, and `carried_headers` for a client. Only `spans` imports the library of the extra `otel`;
the other modules cost nothing without the library.
"""
