"""Which way buckets take to engines: shared memory if all of a group can open it, else gloo."""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist

from rl_async.accelerators import ACCELERATORS, NO_WATCHDOG, Accelerator, accelerator_here
from rl_async.errors import WeightSyncError
from rl_async.process.private_folder import SEGMENTS
from rl_async.weight_sync.buckets import Bucket, verify
from rl_async.weight_sync.process_groups import (
    GlooReceiver,
    GlooSender,
    bind_groups,
    device_groups,
    interface_of,
    own_address,
    require_same_collectives,
    without_watchdog,
)
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from rl_async.weight_sync.transports import NearestReceiver, NearestSender
from tests.support.ports import listeners
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
        # The last is of the engine's second worker.
        infos.append(msgspec.structs.replace(infos[1], rank_offset=infos[1].rank_offset + 1))
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
        # Nobody answers it.
        NearestReceiver(info)
    with pytest.raises(WeightSyncError):
        NearestReceiver(info)


# Stores and interfaces of process groups, broadcasts by gloo, and where NCCL is refused.


NAMES = ("GLOO_SOCKET_IFNAME", accelerator_here().interface)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # restored at the end, whatever the test sets
        del os.environ[name]
    yield


def loopback() -> str:
    return next(name for name, found in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in found))


def test_groups_listen_on_the_interface_by_which_a_rank_reaches_its_master() -> None:
    bind_groups(own_address("127.0.0.1", 1))
    assert [os.environ[name] for name in NAMES] == [loopback(), f"={loopback()}"]


def test_a_rank_alone_leaves_groups_of_devices_free_for_the_weights() -> None:
    bind_groups("127.0.0.1", devices=False)
    assert [name in os.environ for name in NAMES] == [True, False]


def test_a_users_own_choice_stays() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "mine"
    bind_groups("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


def test_an_address_of_no_interface_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert interface_of("203.0.113.1") is None
    with caplog.at_level(logging.WARNING):
        bind_groups("203.0.113.1")
    assert "203.0.113.1" in caplog.text and not set(NAMES) & set(os.environ)


TIMEOUT_S = 30.0
SIZES = (5, 3 << 20, 7, 4 << 20, 2 << 20)  # in elements of 4 bytes; the larger ones fit into no socket's buffer


def packed() -> list[Bucket]:
    """One bucket per size."""
    return [make_buckets([("w", torch.full((n,), float(i)))], n * 4)[0] for i, n in enumerate(SIZES)]


def announced(buckets: list[Bucket]) -> list[UpdateInfo]:
    """Manifests that tell how large the bucket after each is."""
    pairs = zip_longest(buckets, buckets[1:])
    return [msgspec.structs.replace(b.info, next_bytes=ahead.nbytes if ahead else 0) for b, ahead in pairs]


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Run ``work`` in a thread meanwhile."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def pair(name: str) -> tuple[GlooSender, GlooReceiver]:
    """Both sides of a group that has met."""
    sender = GlooSender((1,), name, TIMEOUT_S)
    with beside(sender.connect):
        receiver = GlooReceiver(sender.init_info(0))
    return sender, receiver


def send_all(sender: GlooSender, buckets: list[Bucket]) -> None:
    """With one bucket of look-ahead, as a wave does."""
    sender.stage(buckets[0])
    for bucket, ahead in zip_longest(buckets, buckets[1:]):
        if ahead is not None:
            sender.stage(ahead)
        sender.send(bucket)
        sender.unstage()


@pytest.mark.parametrize("told", [True, False], ids=["told what comes next", "not told"])
def test_all_bytes_arrive_in_order(told: bool) -> None:
    sender, receiver = pair("order")
    buckets = packed()
    with beside(lambda: send_all(sender, buckets)):
        for info in announced(buckets) if told else [bucket.info for bucket in buckets]:
            verify(receiver.receive(info), info)
    sender.close()
    receiver.close()


def test_a_bucket_in_hand_is_not_overwritten_by_the_next() -> None:
    sender, receiver = pair("hand")
    buckets = packed()
    infos = announced(buckets)
    for bucket in buckets[:2]:
        sender.stage(bucket)
    data = receiver.receive(infos[0])
    sender.send(buckets[0])
    sender.unstage()
    sender.send(buckets[1])  # it is here, though nobody has asked for it
    verify(data, infos[0])
    verify(receiver.receive(msgspec.structs.replace(infos[1], next_bytes=0)), infos[1])
    sender.close()
    receiver.close()


def test_another_bucket_than_the_announced_one_is_refused() -> None:
    sender, receiver = pair("other")
    buckets = packed()
    infos = announced(buckets)
    for bucket in buckets[:2]:
        sender.stage(bucket)
    receiver.receive(infos[0])
    with pytest.raises(WeightSyncError, match=f"28 bytes.* {12 << 20} bytes"):
        receiver.receive(infos[2])
    sender.close()
    receiver.close()


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_whoever_leaves_while_a_bucket_is_in_flight_is_free_at_once(who: str) -> None:
    sender, receiver = pair("leave")
    buckets = packed()
    infos = announced(buckets)
    sender.stage(buckets[0])
    if who == "sender":
        sender.stage(buckets[1])
        receiver.receive(buckets[0].info)  # and asks for nothing more
        sender.send(buckets[0])
        work = sender._in_flight[1].work
    else:
        receiver.receive(infos[0])
        work = receiver._in_flight[0].work
    (sender if who == "sender" else receiver).close()
    assert not work.is_completed(), "it waited for what nobody wants any more"
    with pytest.raises(WeightSyncError, match="not connected" if who == "sender" else "has left"):
        sender.stage(buckets[2]) if who == "sender" else receiver.receive(infos[1])
    (receiver if who == "sender" else sender).close()  # which ends it

    again = pair("again")
    with beside(lambda: send_all(again[0], buckets)):
        for info in infos:
            verify(again[1].receive(info), info)
    for end in again:
        end.close()


def test_a_bucket_that_nobody_sends_is_given_up_at_the_deadline() -> None:
    sender, receiver = pair("silent")
    # Only the wait for the bucket is short: on a busy machine, meeting may take longer than that.
    receiver._timeout_s = 0.5
    with pytest.raises(WeightSyncError, match=r"20 bytes: .*[Tt]imed out"):
        receiver.receive(packed()[0].info)
    sender.close()
    receiver.close()


@pytest.fixture
def private(tmp_path: Path) -> Path:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    return folder


def test_a_group_on_one_machine_meets_in_a_file_of_the_user(private: Path) -> None:
    before = set(listeners([os.getpid()]))
    sender = GlooSender((1,), "near", TIMEOUT_S, folder=private)
    info = sender.init_info(0)
    assert (info.master_port, Path(info.store).parent) == (0, private)
    assert set(listeners([os.getpid()])) == before
    with beside(sender.connect):
        receiver = GlooReceiver(info)
    buckets = packed()
    with beside(lambda: send_all(sender, buckets)):
        for bucket in buckets:
            verify(receiver.receive(bucket.info), bucket.info)
    receiver.close()
    sender.close()
    assert not list(private.iterdir())
    with pytest.raises(WeightSyncError, match=r"weight_sync\.way"):
        GlooReceiver(info)


def test_a_file_that_others_may_have_put_there_is_no_store(private: Path) -> None:
    sender = GlooSender((1,), "open", TIMEOUT_S, folder=private)
    private.chmod(0o755)
    with pytest.raises(WeightSyncError, match="0700"):
        GlooReceiver(sender.init_info(0))
    sender.close()


def test_a_store_that_takes_the_connection_and_is_silent_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        info = InitInfo(backend="gloo", master_address="127.0.0.1", master_port=port, world_size=2, timeout_s=0.1)
        with pytest.raises(WeightSyncError):
            GlooReceiver(info)
    for thread in threading.enumerate():
        if thread.name == "store":  # it ends with the connection
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=[one.make for one in ACCELERATORS])
def test_groups_are_of_the_collectives_of_this_accelerator(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, name = type("Groups", (), {}), f"ProcessGroup{accelerator.collectives.upper()}"
    here = SimpleNamespace(type=accelerator.torch_device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: here)
    monkeypatch.setattr(dist, name, groups, raising=False)
    assert device_groups() is groups
    monkeypatch.delattr(dist, name)
    with pytest.raises(WeightSyncError, match=r"weight_sync\.way=nccl"):
        device_groups()


@pytest.mark.parametrize(("sender", "engine"), [("2.27.5", "2.28.3"), ("2.27.5", "2.27.7")])
def test_different_versions_of_nccl_are_named_before_a_group_hangs(sender: str, engine: str) -> None:
    with pytest.raises(WeightSyncError, match=rf"version {sender} .* {engine}.*weight_sync\.way"):
        require_same_collectives(sender, engine)
    for same in ((sender, sender), ("", engine), (sender, "")):
        require_same_collectives(*same)


@pytest.mark.parametrize("before", [None, "0"])
def test_only_groups_of_weights_have_no_watchdog(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NO_WATCHDOG, raising=False)
    if before is not None:
        monkeypatch.setenv(NO_WATCHDOG, before)
    with pytest.raises(WeightSyncError), without_watchdog():
        assert os.environ[NO_WATCHDOG] == "1"
        raise WeightSyncError("a group that did not form")
    assert os.environ.get(NO_WATCHDOG) == before
