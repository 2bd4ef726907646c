"""TPC-H's tables with values of their own making, and its 22 queries.

The values are random, from the domains that the queries ask about. They are not those of the
official generator: answers are compared between two readers of the same rows.
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["TABLES", "queries", "tpch_tables"]

TABLES: Final = (
    "region",
    "nation",
    "supplier",
    "customer",
    "part",
    "partsupp",
    "orders",
    "lineitem",
)
_NATIONS: Final = (
    *("ALGERIA", "ARGENTINA", "BRAZIL", "CANADA", "EGYPT", "ETHIOPIA", "FRANCE", "GERMANY"),
    *("INDIA", "INDONESIA", "IRAN", "IRAQ", "JAPAN", "JORDAN", "KENYA", "MOROCCO", "MOZAMBIQUE"),
    *("PERU", "CHINA", "ROMANIA", "SAUDI ARABIA", "VIETNAM", "RUSSIA", "UNITED KINGDOM"),
    "UNITED STATES",
)
_REGION_OF: Final = [0, 1, 1, 1, 4, 0, 3, 3, 2, 2, 4, 4, 2, 4, 0, 0, 0, 1, 2, 3, 4, 2, 3, 3, 1]
_COLORS: Final = ("almond", "green", "forest", "blue", "antique", "lemon")
_MONEY: Final = pa.decimal128(15, 2)
_FIRST_DAY: Final = (datetime.date(1992, 1, 1) - datetime.date(1970, 1, 1)).days
_DAYS: Final = 2_406


def queries(database: str = "") -> dict[int, str]:
    """Return the queries by number, with the tables of `database`, else with plain names."""
    text = (Path(__file__).parent / "tpch.sql").read_text()
    parts = re.split(r"^-- (\d+)$", text, flags=re.MULTILINE)
    if database:
        names = rf"(?<=[\s,])({'|'.join(TABLES)})(?=[\s,]|$)"
        parts[2::2] = [re.sub(names, rf"{database}.\1", query) for query in parts[2::2]]
    return {int(n): query.strip() for n, query in zip(parts[1::2], parts[2::2], strict=True)}


def tpch_tables(scale: float, *, seed: int = 0) -> dict[str, pa.Table]:
    """Return all tables; `scale` 1 has 6 M line items."""
    make = _Maker(np.random.default_rng(seed))
    counts = {"supplier": 10_000, "customer": 150_000, "part": 200_000, "orders": 1_500_000}
    sizes = {name: max(10, int(count * scale)) for name, count in counts.items()}
    tables = {
        "region": pa.table(
            {
                "r_regionkey": pa.array(range(5), pa.int32()),
                "r_name": ["AFRICA", "AMERICA", "ASIA", "EUROPE", "MIDDLE EAST"],
                "r_comment": ["none"] * 5,
            }
        ),
        "nation": pa.table(
            {
                "n_nationkey": pa.array(range(25), pa.int32()),
                "n_name": list(_NATIONS),
                "n_regionkey": pa.array(_REGION_OF, pa.int32()),
                "n_comment": ["none"] * 25,
            }
        ),
        "supplier": make.supplier(sizes["supplier"]),
        "customer": make.customer(sizes["customer"]),
        "part": make.part(sizes["part"]),
        "partsupp": make.partsupp(sizes["part"], sizes["supplier"]),
    }
    orders = make.orders(sizes["orders"], sizes["customer"])
    tables["orders"] = orders
    tables["lineitem"] = make.lineitem(orders, sizes["part"], sizes["supplier"])
    return tables


class _Maker:
    """Makes tables of one random stream."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def supplier(self, count: int) -> pa.Table:
        return pa.table(
            {
                "s_suppkey": _keys(count),
                "s_name": _names("Supplier", count),
                "s_address": _names("address", count),
                "s_nationkey": self._numbers(count, 0, 25, pa.int32()),
                "s_phone": self._phones(count),
                "s_acctbal": self._money(count, -99_999, 999_999),
                "s_comment": self._chosen(count, ["good", "Customer has Complaints", "fine"]),
            }
        )

    def customer(self, count: int) -> pa.Table:
        segments = ["AUTOMOBILE", "BUILDING", "FURNITURE", "MACHINERY", "HOUSEHOLD"]
        return pa.table(
            {
                "c_custkey": _keys(count),
                "c_name": _names("Customer", count),
                "c_address": _names("address", count),
                "c_nationkey": self._numbers(count, 0, 25, pa.int32()),
                "c_phone": self._phones(count),
                "c_acctbal": self._money(count, -99_999, 999_999),
                "c_mktsegment": self._chosen(count, segments),
                "c_comment": self._chosen(count, ["none", "special requests", "slow"]),
            }
        )

    def part(self, count: int) -> pa.Table:
        brands = [f"Brand#{a}{b}" for a in (1, 2, 3, 4) for b in (2, 3, 5)]
        types = [
            f"{a} {b} {c}"
            for a in ("ECONOMY", "MEDIUM", "PROMO")
            for b in ("ANODIZED", "POLISHED")
            for c in ("BRASS", "STEEL", "TIN")
        ]
        boxes = [f"{a} {b}" for a in ("SM", "MED", "LG") for b in ("BOX", "CASE", "PACK", "PKG")]
        names = [f"{a} {b}" for a in _COLORS for b in _COLORS]
        return pa.table(
            {
                "p_partkey": _keys(count),
                "p_name": self._chosen(count, names),
                "p_mfgr": self._chosen(count, ["Manufacturer#1", "Manufacturer#2"]),
                "p_brand": self._chosen(count, brands),
                "p_type": self._chosen(count, types),
                "p_size": self._numbers(count, 1, 51, pa.int32()),
                "p_container": self._chosen(count, boxes),
                "p_retailprice": self._money(count, 90_000, 200_000),
                "p_comment": self._chosen(count, ["none", None]),
            }
        )

    def partsupp(self, parts: int, suppliers: int) -> pa.Table:
        part = np.repeat(np.arange(1, parts + 1), 4)
        supplier = (part + np.tile(np.arange(4), parts) * (suppliers // 4 + 1)) % suppliers + 1
        return pa.table(
            {
                "ps_partkey": pa.array(part),
                "ps_suppkey": pa.array(supplier),
                "ps_availqty": self._numbers(len(part), 1, 10_000, pa.int64()),
                "ps_supplycost": self._money(len(part), 100, 100_000),
                "ps_comment": self._chosen(len(part), ["none", None]),
            }
        )

    def orders(self, count: int, customers: int) -> pa.Table:
        priorities = ["1-URGENT", "2-HIGH", "3-MEDIUM", "4-NOT SPECIFIED", "5-LOW"]
        # A third of the customers have no order, as in the original.
        customer = self._random.integers(0, max(1, customers * 2 // 3), count) * 3 // 2 + 1
        return pa.table(
            {
                "o_orderkey": _keys(count),
                "o_custkey": pa.array(customer),
                "o_orderstatus": self._chosen(count, ["F", "O", "P"]),
                "o_totalprice": self._money(count, 100_000, 50_000_000),
                "o_orderdate": _dates(self._random.integers(0, _DAYS - 151, count)),
                "o_orderpriority": self._chosen(count, priorities),
                "o_clerk": self._chosen(count, [f"Clerk#{n:09}" for n in range(1, 100)]),
                "o_shippriority": pa.array(np.zeros(count, np.int32)),
                "o_comment": self._chosen(count, ["none", "special pending requests", "quick"]),
            }
        )

    def lineitem(self, orders: pa.Table, parts: int, suppliers: int) -> pa.Table:
        lines = self._random.integers(1, 8, orders.num_rows)
        order = np.repeat(np.arange(1, orders.num_rows + 1), lines)
        count = len(order)
        first = np.repeat(np.cumsum(lines) - lines, lines)
        ordered = orders["o_orderdate"].cast(pa.int32()).to_numpy()[order - 1] - _FIRST_DAY
        shipped = ordered + self._random.integers(1, 122, count)
        part = self._random.integers(1, parts + 1, count)
        turn = self._random.integers(0, 4, count)
        quantity = self._random.integers(1, 51, count)
        modes = ["REG AIR", "AIR", "RAIL", "SHIP", "TRUCK", "MAIL", "FOB"]
        instructions = ["DELIVER IN PERSON", "COLLECT COD", "NONE", "TAKE BACK RETURN"]
        return pa.table(
            {
                "l_orderkey": pa.array(order),
                "l_partkey": pa.array(part),
                "l_suppkey": pa.array((part + turn * (suppliers // 4 + 1)) % suppliers + 1),
                "l_linenumber": pa.array(np.arange(count) - first + 1),
                "l_quantity": _decimals(quantity * 100),
                "l_extendedprice": self._money(count, 90_000, 10_000_000),
                "l_discount": self._money(count, 0, 11),
                "l_tax": self._money(count, 0, 9),
                "l_returnflag": self._chosen(count, ["A", "N", "R"]),
                "l_linestatus": self._chosen(count, ["F", "O"]),
                "l_shipdate": _dates(shipped),
                "l_commitdate": _dates(ordered + self._random.integers(30, 91, count)),
                "l_receiptdate": _dates(shipped + self._random.integers(1, 31, count)),
                "l_shipinstruct": self._chosen(count, instructions),
                "l_shipmode": self._chosen(count, modes),
                "l_comment": self._chosen(count, ["none", None, "about the last order"]),
            }
        )

    def _numbers(self, count: int, least: int, end: int, data_type: pa.DataType) -> pa.Array:
        return pa.array(self._random.integers(least, end, count)).cast(data_type)

    def _money(self, count: int, least: int, end: int) -> pa.Array:
        return _decimals(self._random.integers(least, end, count))

    def _chosen(self, count: int, values: list[str | None] | list[str]) -> pa.Array:
        places = pa.array(self._random.integers(0, len(values), count))
        return pa.array(values, pa.string()).take(places)

    def _phones(self, count: int) -> pa.Array:
        return self._chosen(count, [f"{n}-555-{n * 37 % 1000:03}" for n in range(10, 35)])


def _keys(count: int) -> pa.Array:
    return pa.array(np.arange(1, count + 1))


def _names(word: str, count: int) -> pa.Array:
    return pa.array([f"{word}#{n:09}" for n in range(1, count + 1)])


def _dates(days: npt.NDArray[np.int64]) -> pa.Array:
    return pa.array((days + _FIRST_DAY).astype(np.int32)).cast(pa.date32())


def _decimals(cents: npt.NDArray[np.int64]) -> pa.Array:
    """Return whole cents as money, without a Python object a value."""
    words = np.empty((len(cents), 2), dtype=np.int64)
    words[:, 0], words[:, 1] = cents, cents >> 63
    buffer = pa.py_buffer(np.ascontiguousarray(words))
    return pa.Array.from_buffers(_MONEY, len(cents), [None, buffer])
