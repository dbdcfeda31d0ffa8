"""What a Put stores, and how many bytes it is counted as."""

import hashlib

import msgspec

from rl_async import messages as m
from rl_async.transfer_queue.transitions import SamplesStored
from tests.unit.transfer_queue.server.served import HEADER, Served

MEDIUM = b"m" * 1000
KEY = hashlib.sha256(MEDIUM).hexdigest()


def test_a_medium_counts_although_the_first_sample_that_has_it_is_fenced() -> None:
    served = Served(group_size=2, batch_groups=1, max_attempts=3)
    served.hello("t", "a")
    served.publish()
    served.lease("a")
    fenced = msgspec.structs.replace(HEADER, sample=0, attempt=7, media=[KEY])
    good = msgspec.structs.replace(HEADER, sample=1, media=[KEY])
    put = m.Put(worker="a", samples=[[fenced], [good]], lengths=[3, 3], media=[(0, KEY)])
    (answer,) = served.ask("a", put, b"rowrow", MEDIUM)
    assert isinstance(answer.response.reply, m.Taken)
    assert [refused is None for refused in answer.response.reply.refused] == [False, True]
    (stored,) = [event for event in served.seen if isinstance(event, SamplesStored)]
    assert [header.nbytes for headers in stored.samples for header in headers] == [3 + len(MEDIUM)]
