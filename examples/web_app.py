"""A web application over a table: FastAPI, and one client for all of its requests.

Run it beside a service:

    pip install pyspark-streamhouse fastapi uvicorn
    STREAMHOUSE_ENDPOINT=http://127.0.0.1:8765 uvicorn --app-dir examples web_app:app

    curl -X PUT localhost:8000/orders -H 'Content-Type: application/json' \
         -d '[{"id": 1, "city": "Lyon", "price": 9.5}]'
    curl localhost:8000/orders/1
    curl localhost:8000/orders
    curl -N localhost:8000/changes
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from streamhouse import AsyncStreamhouseClient

TABLE = "web.orders"


class Order(BaseModel):
    """A row of the table."""

    id: int
    city: str
    price: float


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Have one client as long as the application runs; its end ends all subscriptions."""
    async with AsyncStreamhouseClient() as client:
        columns = "id bigint, city string, price double"
        await client.create_table(TABLE, columns, primary_key="id", if_not_exists=True)
        app.state.client = client
        yield


app = FastAPI(title="Orders", lifespan=lifespan)


@app.put("/orders")
async def put_orders(orders: list[Order]) -> dict[str, int]:
    """Store orders; they are durable when this is answered."""
    await app.state.client.upsert(TABLE, [order.model_dump() for order in orders])
    return {"stored": len(orders)}


@app.get("/orders/{order_id}")
async def get_order(order_id: int) -> Order:
    """Look an order up by its key."""
    row = await app.state.client.lookup_one(TABLE, id=order_id)
    if row is None:
        raise HTTPException(404, f"there is no order {order_id}")
    return Order(**row)


@app.get("/orders")
async def get_orders() -> StreamingResponse:
    """Send every order as of now, a line of JSON each, in bounded memory."""
    scan = await app.state.client.scan(TABLE)

    async def lines() -> AsyncIterator[str]:
        async with scan:
            async for batch in scan:
                yield "".join(f"{json.dumps(row)}\n" for row in batch.to_pylist())

    return StreamingResponse(lines(), media_type="application/x-ndjson")


@app.get("/changes")
async def get_changes() -> StreamingResponse:
    """Send each change of the table as an event, from the first one on."""
    batches = await app.state.client.subscribe(TABLE, start="earliest")

    async def events() -> AsyncIterator[str]:
        # Also when the browser goes away: then the wait for a batch is cancelled.
        async with batches:
            async for batch in batches:
                for row in batch.data.to_pylist():
                    yield f"data: {json.dumps(row)}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
