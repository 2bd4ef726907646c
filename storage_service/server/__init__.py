"""The storage service over HTTP.

`listener.run_service` is the door: it opens the tables, listens, and stops in order. `routes.py`
lists every route with what it asks of its caller, `app.py` takes a request to the one it is for.
`service.py` is what all routes share. Rooms, from the top: `control/` and `data/` answer,
`access/` and `status/` judge and show, `http/` carries; `caller.py` is below all of them.
"""
