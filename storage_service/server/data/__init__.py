"""The data routes, rows in and out by offset and by key: functions straight on ASGI."""
