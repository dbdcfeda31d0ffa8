"""Which way buckets take to engines: shared memory if all of a group can open it, else gloo."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch

from rl_async.errors import WeightSyncError
from rl_async.process.private_folder import SEGMENTS
from rl_async.weight_sync.buckets import verify
from rl_async.weight_sync.protocol import InitInfo
from rl_async.weight_sync.transports import NearestReceiver, NearestSender
from tests.support.weights import make_buckets

BUCKETS = list(make_buckets([(name, torch.full((4,), 1.0)) for name in "abc"], 16))
ABROAD = "rl-async-abroad"  # names no segment, as on another machine, or in a container with its own /dev/shm
MORE_THAN_ALL = 1 << 50


def joined(sender: NearestSender, infos: Sequence[InitInfo]) -> list[NearestReceiver]:
    """The engines' sides, once sender and engines have met."""
    with ThreadPoolExecutor(len(infos)) as threads:
        receivers = [threads.submit(NearestReceiver, info) for info in infos]
        sender.connect()
        return [receiver.result() for receiver in receivers]


@pytest.mark.parametrize(
    ("abroad", "nbytes", "memory"),
    [((), 16, True), ((1,), 16, False), ((0, 1), 16, False), ((), MORE_THAN_ALL, False)],
    ids=["all near", "one is not", "none is", "no room"],
)
def test_a_group_uses_shared_memory_only_if_all_of_it_can(abroad: tuple[int, ...], nbytes: int, memory: bool) -> None:
    with closing(NearestSender((1, 2), "way", 30.0, nbytes)) as sender:
        infos = [sender.init_info(0), sender.init_info(1)]
        segment = Path(SEGMENTS, infos[0].shm_name)
        for member in abroad:
            infos[member] = msgspec.structs.replace(infos[member], shm_name=ABROAD)
        infos.append(msgspec.structs.replace(infos[1], rank_offset=infos[1].rank_offset + 1))  # its second worker
        receivers = joined(sender, infos)
        for bucket in BUCKETS:
            staged = sender.stage(bucket)
            assert bool(staged.shm_name) == memory
            with ThreadPoolExecutor(len(receivers)) as threads:
                came = [threads.submit(receiver.receive, staged) for receiver in receivers]
                sender.send(bucket)
                for data in came:
                    verify(data.result(), staged)
            sender.unstage()
        assert (segment.name in {path.name for path in SEGMENTS.iterdir()}) == memory, "what nobody uses is given back"
        for receiver in receivers:
            receiver.close()
    assert segment == SEGMENTS or not segment.exists()


def test_it_gives_up_at_the_deadline_when_an_engine_does_not_come() -> None:
    with closing(NearestSender((1,), "lonely", 0.3, 16)) as sender, pytest.raises(WeightSyncError, match="lonely"):
        sender.connect()


def test_an_engine_does_not_wait_for_a_sender_that_has_left() -> None:
    sender = NearestSender((1,), "left", 0.5, 16)
    info = sender.init_info(0)
    with closing(sender), pytest.raises(WeightSyncError, match="left"):
        NearestReceiver(info)  # which nobody answers
    with pytest.raises(WeightSyncError):
        NearestReceiver(info)
