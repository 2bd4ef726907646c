"""Where in the journal operations are, as checkpoints name it."""

from __future__ import annotations

from streamhouse.storage_service.ownership.journal._pipeline import Pipeline
from streamhouse.storage_service.ownership.journal.epochs import SealReason
from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.reader import JournalReader
from streamhouse.storage_service.ownership.journal.steps import do, run
from tests.support.journal_world import NAMES, numbered, taken
from tests.support.memory_store import MemoryStore


def test_while_an_epoch_is_rolled_what_is_to_come_is_at_its_seal() -> None:
    """Behind the seal there never is an object: a checkpoint of such a place would be lost."""
    store = MemoryStore()
    pipeline = Pipeline(taken(store))
    for sent in (pipeline.send([numbered(0)]), pipeline.seal(SealReason.ROLLED)):
        run(sent.steps(), lambda step: do(store, step))
        pipeline.stored(sent)

    place, applied = pipeline.place_of(1)

    assert (place, applied) == (Place(1, 2), 0)
    pipeline.rolled(run(pipeline.next_epoch(), lambda step: do(store, step)))
    sent = pipeline.send([numbered(1)])
    run(sent.steps(), lambda step: do(store, step))
    reader = JournalReader(store, NAMES, start=place, ahead=0)
    found = [*list(reader.read_to(2)), reader.next(), reader.next()]
    assert [one.place for one in found if one] == [Place(1, 2), Place(2, 0), Place(2, 1)]
