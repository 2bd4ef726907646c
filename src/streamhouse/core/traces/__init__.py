"""OpenTelemetry traces: what one call waited for, told to whoever follows the call.

The door is `opened_spans` for a process that makes spans, `stage_ended` for code that has a stage
to tell of, and `carried_headers` for a client. Only `spans` imports the library, which the extra
`otel` installs; the rest costs nothing without it.
"""
