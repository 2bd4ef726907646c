"""The storage service over HTTP.

`listener.run_service` is the entry: it opens the tables, listens, and stops in order. `routes.py`
lists every route with the grant that the route needs, and `_app.py` dispatches requests to routes.
`service.py` has the parts that all routes share. Folders, from the top: `control/` and `data/` have
the routes, `access/` checks callers, `status/` has metrics and the status page, `http/` has
connections and messages. `caller.py` is below all folders.
"""
