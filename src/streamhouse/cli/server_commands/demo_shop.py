"""The example of `streamhouse demo`: a shop's customers, and orders that never stop.

All rows are made up, from a seed of chance. The first start writes a month of past orders; a later
start on the same directory goes on with the next order.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Final

import pyarrow as pa

from streamhouse.client import StorageClient
from streamhouse.core.errors import StreamhouseError
from streamhouse.core.threads import NamedThread

__all__ = ["CUSTOMERS", "FRESHNESS", "ORDERS", "DemoShop"]

ORDERS: Final = "shop.orders"
CUSTOMERS: Final = "shop.customers"
FRESHNESS: Final = "10s"
"""How soon a round moves new rows into Iceberg."""

_CUSTOMER_COUNT: Final = 200
_PAST_ORDERS: Final = 20_000
_PAST_US: Final = 30 * 86_400_000_000
_TICK_S: Final = 0.25
# Every so many ticks a customer moves to another city.
_MOVE_TICKS: Final = 8
_CITIES: Final = ("Lyon", "Oslo", "Porto", "Turin", "Vienna", "Zagreb")
_FIRST_NAMES: Final = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo", "Ida", "Jon")
_LAST_NAMES: Final = ("Berg", "Costa", "Duval", "Eriksen", "Fabbri", "Gruber", "Horvat", "Iversen")
_PRICES: Final = {"tea": 4.5, "coffee": 9.0, "honey": 7.25, "jam": 3.8, "oil": 12.4, "rice": 2.9}


class DemoShop:
    """Writes orders on a thread until `stop`: `rate` a second.

    `on_open` is called on the thread once the tables have rows, and `on_failure` at a failure.
    """

    def __init__(
        self,
        client: StorageClient,
        *,
        rate: int,
        on_open: Callable[[], None],
        on_failure: Callable[[StreamhouseError], None],
    ) -> None:
        self._client = client
        self._rate = rate
        self._on_open = on_open
        self._on_failure = on_failure
        self._random = random.Random(1)
        self._next_order = 1
        self._stopping = threading.Event()
        self._thread = NamedThread("demo-shop", self._run)

    def start(self) -> None:
        """Make the tables where they are missing, with past orders; then let orders arrive."""
        self._thread.start()

    def _open(self) -> None:
        properties = {"table.datalake.freshness": FRESHNESS}
        self._client.create_table(
            CUSTOMERS,
            "customer_id bigint, name string, city string",
            primary_key="customer_id",
            properties=properties,
            if_not_exists=True,
        )
        self._client.create_table(
            ORDERS,
            "order_id bigint not null, customer_id bigint, item string, quantity int,"
            " price double, ordered_at timestamp",
            properties=properties,
            if_not_exists=True,
        )
        ends = self._client.positions(ORDERS).values()
        self._next_order = 1 + sum(end.high_watermark - end.first_offset for end in ends)
        if self._next_order == 1:
            customers = [self._customer(number) for number in range(1, _CUSTOMER_COUNT + 1)]
            self._client.upsert(CUSTOMERS, customers)
            now_us = time.time_ns() // 1_000
            step_us = _PAST_US // _PAST_ORDERS
            first_us = now_us - _PAST_US
            self._write_orders([first_us + n * step_us for n in range(_PAST_ORDERS)])

    def stop(self) -> None:
        """Let the last order arrive."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._open()
            self._on_open()
            self._sell()
        except StreamhouseError as error:
            if not self._stopping.is_set():
                self._on_failure(error)

    def _sell(self) -> None:
        ticks, waiting = 0, 0.0
        while not self._stopping.wait(_TICK_S):
            ticks += 1
            waiting += self._rate * _TICK_S
            self._write_orders([time.time_ns() // 1_000] * int(waiting))
            waiting -= int(waiting)
            if not ticks % _MOVE_TICKS:
                number = self._random.randint(1, _CUSTOMER_COUNT)
                self._client.upsert(CUSTOMERS, self._customer(number))

    def _customer(self, number: int) -> dict[str, object]:
        """Return a customer, always of the same name, in any city."""
        names = random.Random(number)
        return {
            "customer_id": number,
            "name": f"{names.choice(_FIRST_NAMES)} {names.choice(_LAST_NAMES)}",
            "city": self._random.choice(_CITIES),
        }

    def _write_orders(self, times_us: list[int]) -> None:
        count = len(times_us)
        if not count:
            return
        items = self._random.choices([*_PRICES], k=count)
        rows = {
            "order_id": pa.array(range(self._next_order, self._next_order + count), pa.int64()),
            "customer_id": pa.array(
                self._random.choices(range(1, _CUSTOMER_COUNT + 1), k=count), pa.int64()
            ),
            "item": pa.array(items),
            "quantity": pa.array(self._random.choices(range(1, 6), k=count), pa.int32()),
            "price": pa.array([_PRICES[item] for item in items]),
            "ordered_at": pa.array(times_us, pa.timestamp("us", "UTC")),
        }
        self._client.append(ORDERS, pa.table(rows))
        self._next_order += count
