"""Ranks that send: their rounds, all of them as one shipment, and how they meet and leave."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import product
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.concurrency import in_daemon_thread
from rl_async.configs.schema.trainer import WayOption, WeightSyncConfig
from rl_async.errors import EngineLost, RanksLost, WeightSyncError
from rl_async.messages import Version
from rl_async.weight_sync import transports
from rl_async.weight_sync.buckets import Bucket, unpack, wire_bytes
from rl_async.weight_sync.layout import Box, Layout, Shard, TensorSpec, cut, engine, fsdp2, slices, volume, whole
from rl_async.weight_sync.layout import shards_of as layout_shards
from rl_async.weight_sync.process_groups import joined_store, listening_store
from rl_async.weight_sync.protocol import Hold, InitInfo, TransportName, UpdateInfo, of_worker
from rl_async.weight_sync.receiver import Assembler, WeightReceiver
from rl_async.weight_sync.reshard import plan
from rl_async.weight_sync.sender import Needs, Outlet, OutletServer, RemoteOutlet, followed, led, plan_rounds
from rl_async.weight_sync.transports import SharedMemorySender
from tests.support.resharding import figures
from tests.support.weights import HOST, TOKEN, TrainerRanks, shards_of, specs_of
from tests.unit.weight_sync.fleet_engines import Directory, Engine, eventually, make_fleet, specs

V1, V2 = Version(0, 1), Version(0, 2)
NAMED = {"rows": (6, 4), "columns": (5, 8), "both": (3, 4, 2), "one": (7,), "none": (2, 2)}
NEEDS: list[Needs] = [
    {
        "rows": (((0, 3), (0, 4)),),
        "columns": (((0, 5), (0, 4)),),
        "both": (((0, 3), (0, 1), (0, 2)), ((0, 3), (2, 3), (0, 2))),  # as gate and up of stacked experts
        "one": (((0, 7),),),
        "none": (),
    },
    {
        "rows": (((3, 6), (0, 4)),),
        "columns": (),
        "both": (((1, 2), (0, 4), (0, 2)),),
        "one": (((2, 5),),),
        "none": (),
    },
]


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: (torch.randn(shape) * 100).to(dtype) for name, shape in NAMED.items()}


def by_columns(named: Mapping[str, TensorSpec]) -> Layout:
    """Two ranks of which each has half of the last dimension, and both have vectors, as with tensor parallelism."""

    def held(shape: tuple[int, ...]) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        last, size = len(shape) - 1, shape[-1]
        if not last:
            return [(0, whole(shape)), (1, whole(shape))]
        return [(0, cut(shape, last, range(size // 2))), (1, cut(shape, last, range(size // 2, size)))]

    return Layout(named, {name: layout_shards(held(spec.shape)) for name, spec in named.items()})


LAYOUTS = {
    "1 rank": lambda named: fsdp2(named, 1),
    "2 ranks": lambda named: fsdp2(named, 2),
    "4 ranks": lambda named: fsdp2(named, 4),
    "2 replicas": lambda named: fsdp2(named, 2, replicas=2),
    "columns": by_columns,
}


def received(
    ranks: TrainerRanks, version: Version, named: Mapping[str, Tensor], needs: Sequence[Needs | None], hold: Hold
) -> tuple[list[dict[str, Tensor]], list[list[UpdateInfo]], int]:
    """What the loader of each worker gets, and the manifests that it was told, and the bytes sent."""
    weights = ranks.weights(named)
    weights.begin(version, hold)
    shipment = weights.shipment(1, needs)
    got: list[dict[str, Tensor]] = [{} for _ in needs]
    loads = [Assembler(lambda found, to=to: to.update((name, tensor.clone()) for name, tensor in found)) for to in got]
    receivers = [WeightReceiver(load) for load in loads]
    infos: list[list[UpdateInfo]] = [[] for _ in needs]
    for worker, receiver in enumerate(receivers):
        receiver.init(of_worker(shipment.init_info(0), worker))
        receiver.start()
    for number in range(shipment.count):
        info = msgspec.json.decode(msgspec.json.encode(shipment.stage(number)), type=UpdateInfo)
        for worker, receiver in enumerate(receivers):
            receiver.update(of_worker(info, worker))
            infos[worker].append(of_worker(info, worker))
    for receiver in receivers:
        receiver.finish()
        receiver.close()
    weights.seal()
    shipment.close()
    return got, infos, shipment.nbytes


@pytest.mark.thinned("layout", 2)
@pytest.mark.parametrize("hold", ["no", "stage"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bucket_bytes", [16, 70, 1 << 20])
def test_workers_get_their_boxes_in_place_and_nothing_else(layout: str, bucket_bytes: int, hold: Hold) -> None:
    sync = WeightSyncConfig(way="ipc", bucket_bytes=bucket_bytes, timeout_s=30)
    first = tensors(torch.bfloat16)
    made = LAYOUTS[layout](specs_of(first))
    with TrainerRanks(first, max(made.ranks) + 1, sync, made) as ranks:
        for version, named in ((V1, first), (V2, tensors(torch.bfloat16))):
            got, infos, nbytes = received(ranks, version, named, [*NEEDS, None], hold)
            assert {name: tensor.equal(named[name]) for name, tensor in got[2].items()} == dict.fromkeys(NAMED, True)
            for worker, needs in enumerate(NEEDS):
                assert got[worker].keys() == {name for name, boxes in needs.items() if boxes}
                for name, tensor in got[worker].items():
                    expected = torch.full_like(tensor, float("nan"))
                    for box in needs[name]:
                        part = slices(box, whole(tensor.shape))
                        expected[part] = named[name][part]
                    assert torch.equal(torch.nan_to_num(tensor, nan=7.0), torch.nan_to_num(expected, nan=7.0))
            of_sources = [[info.sources or [info] for info in of_one] for of_one in infos]
            told_versions = {each.version for of_one in of_sources for of_round in of_one for each in of_round}
            assert told_versions == {"" if hold == "no" else str(version)}
            sizes = [[[wire_bytes(source) for source in of_round] for of_round in of_one] for of_one in of_sources]
            told = [[[source.next_bytes for source in of_round] for of_round in of_one] for of_one in of_sources]
            for of_one, announced in zip(sizes, told, strict=True):
                assert announced == [*of_one[1:], [0] * len(of_one[-1])]
                assert all(sum(of_round) <= bucket_bytes + len(of_round) for of_round in of_one)
            assert nbytes == sum(size for of_one in sizes for of_round in of_one for size in of_round)


def test_the_first_sender_of_a_round_is_not_the_only_one() -> None:
    rounds = plan_rounds(fsdp2({"w": TensorSpec((8, 4), "float32"), "v": TensorSpec((8,), "float32")}, 4), 1 << 10)
    assert len(rounds.parts) == 1 and rounds.senders == [0, 1, 2, 3]
    bytes_of = [sum(4 * volume(part.box) for part in rounds.of_rank(rank)[0]) for rank in range(4)]
    assert bytes_of == [2 * 16 + 2 * 4] * 4


def test_replicas_share_the_work() -> None:
    rounds = plan_rounds(fsdp2({f"w{i}": TensorSpec((8, 4), "float32") for i in range(6)}, 2, replicas=2), 1 << 10)
    parts = [part for of_round in rounds.parts for part in of_round]
    sent = [sum(volume(part.box) for part in parts if part.held.rank == rank) for rank in range(4)]
    assert sent == [6 * 32 // 4] * 4


@pytest.mark.parametrize(("tp", "ranks"), list(product((2, 4), (1, 2, 4))))
def test_tensor_parallel_slices_are_as_few_bytes_as_the_minimal_plan(tp: int, ranks: int) -> None:
    named = {name: TensorSpec(spec.shape, "bfloat16") for name, spec in specs().items()}
    wanted = engine(named, tp=tp, kv_heads=2)
    needs: list[Needs] = [
        {name: tuple(s.box for s in shards if s.rank == rank) for name, shards in wanted.shards.items()}
        for rank in range(tp)
    ]
    trainer = Layout(named, {name: (Shard(tp, whole(spec.shape)),) for name, spec in named.items()})
    minimal = figures(plan(trainer, wanted, 1 << 20)).minimal
    weights = {name: torch.randn(spec.shape).to(torch.bfloat16) for name, spec in named.items()}
    with TrainerRanks(weights, ranks, WeightSyncConfig(way="ipc", bucket_bytes=1 << 16)) as trainers:
        _, _, sent = received(trainers, V1, weights, needs, "no")
    assert minimal <= sent <= 1.05 * minimal < tp * sum(tensor.nbytes for tensor in weights.values())


@pytest.mark.parametrize("box", [((0, 7), (0, 4)), ((3, 3), (0, 4)), ((0, 3),), ((0, 3), (0, 4))])
def test_boxes_that_do_not_fit_their_tensor_are_refused(box: tuple[tuple[int, int], ...]) -> None:
    named = tensors()
    with TrainerRanks(named, 1, WeightSyncConfig(way="ipc", bucket_bytes=1 << 20)) as ranks:
        _, infos, _ = received(ranks, V1, named, [NEEDS[1]], "no")
    info = infos[0][0]
    data = torch.zeros(sum(4 * numel for numel in info.numels), dtype=torch.uint8)
    assert unpack(data, info)
    at = info.names.index("both")
    boxes = [list(map(list, box)) if number == at else found for number, found in enumerate(info.boxes)]
    with pytest.raises(WeightSyncError, match="both"):
        unpack(data, msgspec.structs.replace(info, boxes=boxes))


def test_more_elements_than_travel_are_refused() -> None:
    named = tensors()
    with TrainerRanks(named, 1, WeightSyncConfig(way="ipc", bucket_bytes=1 << 20)) as ranks:
        _, infos, _ = received(ranks, V1, named, [NEEDS[1]], "no")
    info = infos[0][0]
    data = torch.zeros(sum(4 * numel for numel in info.numels), dtype=torch.uint8)
    with pytest.raises(WeightSyncError, match="which has"):
        unpack(data, msgspec.structs.replace(info, totals=[total - 1 for total in info.totals]))


HALVES = [[[[(0, 2)]], [[(0, 4)]]], [[[(2, 4)]], []]]  # of a and b, for two workers
TRANSPORTS: list[TransportName] = ["nearest", "ipc", "gloo", "disk"]


def sync_of(
    transport: TransportName, folder: Path, added: Sequence[WayOption] = (), **options: float
) -> WeightSyncConfig:
    return WeightSyncConfig(
        way=(transport, *added), folder=str(folder / "weights"), bucket_bytes=16, timeout_s=30, **options
    )


def named(value: float) -> dict[str, Tensor]:
    return {"a": torch.full((4,), float(value)), "b": torch.full((4,), float(value))}


@pytest.mark.thinned("transport", 2)
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_workers_get_only_the_slices_that_they_need(
    transport: TransportName, ranks: int, staged: bool, tmp_path: Path
) -> None:
    engines = {"x": Engine(workers=2, needs=HALVES), "y": Engine(workers=2, needs=HALVES), "one": Engine()}
    sync = sync_of(transport, tmp_path, ["staged"] if staged else [])
    fleet = make_fleet(directory := Directory(**engines), transport, timeout_s=30, sync=sync)
    with TrainerRanks(named(0), ranks, sync) as trainer:
        for step in (1, 2):
            weights = named(float(step))
            report = await fleet.publish(Version(0, step), trainer.weights(weights))
            assert (sorted(report.engines), report.failures) == (["one", "x", "y"], [])
            for name in ("x", "y"):
                assert engines[name].of_workers == [{"a": 2.0 * step, "b": 4.0 * step}, {"a": 2.0 * step}]
            assert engines["one"].weights == {"a": 4.0 * step, "b": 4.0 * step}
            for tensor in weights.values():
                tensor.fill_(99)  # training goes on; late engines get what was published
        late = Engine(workers=2, needs=HALVES)
        directory.add("late", late)
        catching_up = asyncio.create_task(fleet.keep_caught_up())
        await eventually(lambda: late.serves == Version(0, 2))
        catching_up.cancel()
        assert late.of_workers == [{"a": 4.0, "b": 8.0}, {"a": 4.0}]
        await fleet.publish(Version(0, 3), trainer.weights(named(3.0)))
        assert late.of_workers == [{"a": 6.0, "b": 12.0}, {"a": 6.0}], "the slices of what it caught up with"
        assert [engine.calls.count("boxes") for engine in engines.values()] == [1, 1, 0]
        await fleet.close()


@pytest.mark.parametrize(("ranks", "idle"), [(1, 1), (4, 8)])  # a byte from a rank that has nothing for a worker
async def test_the_bytes_of_a_publication_are_those_of_all_workers_of_an_engine(
    ranks: int, idle: int, tmp_path: Path
) -> None:
    sent, sync = [], sync_of("ipc", tmp_path)
    for member in (Engine(workers=2, needs=HALVES), Engine(workers=2), Engine()):
        fleet = make_fleet(Directory(a=member), sync=sync)
        with TrainerRanks(named(1), ranks, sync) as trainer:
            sent.append((await fleet.publish(Version(), trainer.weights(named(1)))).nbytes)
        await fleet.close()
    assert sent == [8 + 16 + 8 + idle, 2 * 32, 32]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_engine_that_dies_is_cut_off_and_the_others_go_on(transport: TransportName, tmp_path: Path) -> None:
    engines = {"good": Engine(), "bad": Engine({"update 2": EngineLost("gone")}), "fine": Engine()}
    sync = sync_of(transport, tmp_path)
    fleet = make_fleet(directory := Directory(**engines), transport, timeout_s=4, sync=sync)
    with TrainerRanks(named(0), 2, sync) as trainer:
        report = await fleet.publish(Version(0, 1), trainer.weights(named(1)))
        assert sorted(report.engines) == ["fine", "good"] and list(directory.removed) == ["bad"]
        assert engines["good"].weights == engines["fine"].weights == {"a": 4.0, "b": 4.0}
        await fleet.close()


async def test_no_engine_is_blamed_for_a_rank_that_is_lost(tmp_path: Path) -> None:
    sync = sync_of("gloo", tmp_path)
    fleet = make_fleet(directory := Directory(x=Engine(), y=Engine()), "gloo", timeout_s=4, sync=sync)
    with TrainerRanks(named(0), 2, sync) as trainer:
        await fleet.publish(Version(0, 1), trainer.weights(named(1)))
        weights = trainer.weights(named(2))

        def lost(key: str, number: int) -> None:
            raise SystemExit  # its thread ends, and with it the connection, as if the process had

        trainer.outlets[1].send = lost  # type: ignore[method-assign]
        with pytest.raises(RanksLost, match="rank 1"):
            await fleet.publish(Version(0, 2), weights)
        assert directory.removed == {} and directory.published == (Version(0, 1), ["x", "y"])
        await fleet.close()


async def test_a_group_that_opens_when_its_update_is_over_is_closed(tmp_path: Path) -> None:
    """The folder of a group of engines exists as long as the group is open."""
    sync = sync_of("disk", tmp_path, sync_timeout_s=1.0)
    fleet = make_fleet(directory := Directory(a=Engine()), "disk", sync=sync)
    first_is_open, may_open, has_opened = threading.Event(), threading.Event(), threading.Event()
    with TrainerRanks(named(0), 2, sync) as trainer:
        first_at_once, at_once = trainer.outlets[0].open, trainer.outlets[1].open

        def first(key: str, members: int, needs: Sequence[Needs | None]) -> list[list[InitInfo]]:
            joins = first_at_once(key, members, needs)
            first_is_open.set()
            return joins

        def late(key: str, members: int, needs: Sequence[Needs | None]) -> list[list[InitInfo]]:
            # The update's deadline passes while the group is half open.
            first_is_open.wait(30)
            may_open.wait(30)
            joins = at_once(key, members, needs)
            has_opened.set()
            return joins

        trainer.outlets[0].open = first  # type: ignore[method-assign]
        trainer.outlets[1].open = late  # type: ignore[method-assign]
        with pytest.raises(WeightSyncError):
            await fleet.publish(Version(0, 1), trainer.weights(named(1)))
        assert list(directory.removed) == ["a"] and any((tmp_path / "weights").iterdir())
        may_open.set()
        await eventually(lambda: has_opened.is_set() and not any((tmp_path / "weights").iterdir()))
        await fleet.close()


async def test_a_late_engine_gets_all_of_a_version_before_the_next_is_copied(tmp_path: Path) -> None:
    """Models leave their devices, and the ranks' copies are made anew, while other engines may still be served."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Engine):
        async def update(self, info: UpdateInfo) -> None:
            begun.set()
            await asyncio.wait_for(go_on.wait(), 30)
            await super().update(info)

    sync, late, later = sync_of("ipc", tmp_path), Slow(), Engine()
    fleet = make_fleet(directory := Directory(first=Engine()), sync=sync, timeout_s=30)
    with TrainerRanks(named(0), 2, sync) as trainer:
        await fleet.publish(Version(0, 1), trainer.weights(named(1)))
        catching_up = asyncio.create_task(fleet.keep_caught_up())
        directory.add("late", late)
        await asyncio.wait_for(begun.wait(), 30)
        deferring = asyncio.create_task(fleet.defer_late())
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        await deferring
        weights = trainer.weights(named(2))
        for outlet in trainer.outlets:
            outlet.keep(stays=True)
        assert late.weights == {"a": 4.0, "b": 4.0} and directory.confirmed == [("late", Version(0, 1))]
        directory.add("later", later)
        await asyncio.sleep(0.2)
        assert later.calls == []
        await fleet.publish(Version(0, 2), weights)
        assert late.weights == later.weights == {"a": 8.0, "b": 8.0}
        catching_up.cancel()
        await fleet.close()


class Told(Engine):
    """Tells its calls to a list that all engines and ranks share."""

    def __init__(self, log: list[str], workers: int = 1, needs: list[list[list[Box]]] | None = None) -> None:
        super().__init__(workers=workers, needs=needs)
        self._log = log

    def _called(self, name: str) -> None:
        self._log.append(name)
        super()._called(name)


def telling(trainer: TrainerRanks, log: list[str]) -> set[str]:
    """Have each rank tell that what it keeps has left; return all of that."""

    def told(rank: int, leave: Callable[[], None]) -> None:
        leave()
        log.append(f"leave {rank}")

    for rank, outlet in enumerate(trainer.outlets):
        outlet.leave = partial(told, rank, outlet.leave)  # type: ignore[method-assign]
    return {f"leave {rank}" for rank in range(len(trainer.outlets))}


async def test_what_ranks_keep_leaves_before_any_cache_wakes_and_awake_engines_do_not_wait_for_it(
    tmp_path: Path,
) -> None:
    """The engines form two groups."""
    log: list[str] = []
    sync, engines = sync_of("ipc", tmp_path), {"whole": Told(log), "cut": Told(log, workers=2, needs=HALVES)}
    fleet = make_fleet(Directory(**engines), sync=sync, timeout_s=30)
    with TrainerRanks(named(0), 2, sync) as trainer:
        all_ranks = telling(trainer, log)
        await fleet.publish(Version(0, 1), trainer.weights(named(1)))
        assert all_ranks == {call for call in log if call.startswith("leave")}
        assert not all_ranks & set(log[: len(log) - log[::-1].index("resume")])
        await fleet.suspend()
        log.clear()
        await fleet.publish(Version(0, 2), trainer.weights(named(2)))
        assert log.count("wake kv_cache") == 2
        assert all_ranks <= set(log[: log.index("wake kv_cache")])
        await fleet.close()


async def test_no_cache_wakes_and_no_engine_is_blamed_if_what_a_rank_keeps_does_not_leave(tmp_path: Path) -> None:
    log: list[str] = []
    sync = sync_of("ipc", tmp_path)
    fleet = make_fleet(directory := Directory(a=Told(log), b=Told(log)), sync=sync, timeout_s=4)
    with TrainerRanks(named(0), 2, sync) as trainer:
        await fleet.publish(Version(0, 1), trainer.weights(named(1)))
        await fleet.suspend()
        weights = trainer.weights(named(2))

        def lost() -> None:
            raise SystemExit  # its thread ends, and with it the connection, as if the process had

        trainer.outlets[1].leave = lost  # type: ignore[method-assign]
        with pytest.raises(RanksLost, match="rank 1"):
            await fleet.publish(Version(0, 2), weights)
        assert "wake kv_cache" not in log and directory.removed == {}
        await fleet.close()


async def test_what_ranks_keep_has_left_when_an_engine_starts(tmp_path: Path) -> None:
    log: list[str] = []
    sync = sync_of("ipc", tmp_path)
    fleet = make_fleet(directory := Directory(), sync=sync, timeout_s=30, engine_wait_s=30)
    with TrainerRanks(named(0), 2, sync) as trainer:
        all_ranks = telling(trainer, log)
        publication = asyncio.create_task(fleet.publish(Version(0, 1), trainer.weights(named(1))))
        await eventually(lambda: all_ranks == set(log))
        directory.add("a", Told(log))
        assert (await publication).engines == ["a"]
        await fleet.close()


async def test_a_rank_copies_round_after_round_without_waiting_for_an_engine() -> None:
    copied: list[str] = []

    class Watched(dict[tuple[str, Box], Tensor]):
        def __getitem__(self, key: tuple[str, Box]) -> Tensor:
            copied.append(key[0])
            return super().__getitem__(key)

    outlet = Outlet(0, WeightSyncConfig(way="ipc", bucket_bytes=16), HOST, 5)
    weights = shards_of(fsdp2(specs_of(named(1)), 2), 0, named(1))
    outlet.offer(weights._replace(held=Watched(weights.held)))
    assert not copied
    outlet.begin("0.1", 1, "no")
    await eventually(lambda: copied == ["a", "b"])
    outlet.disconnect()


def test_ranks_begin_with_different_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    served: dict[int, list[str]] = {}

    class Noting(SharedMemorySender):
        def __init__(self, setup: transports.SenderSetup) -> None:
            super().__init__()
            _, rank, self.worker = setup.group_name.rsplit("-", 2)
            self.rank = int(rank)

        def send(self, bucket: Bucket) -> None:
            served.setdefault(self.rank, []).append(self.worker)

    ours = transports.TRANSPORTS["ipc"]._replace(sender=Noting)
    monkeypatch.setitem(transports.TRANSPORTS, "ipc", ours)
    whole_tensors = tensors()
    with TrainerRanks(whole_tensors, 3, WeightSyncConfig(way="ipc", bucket_bytes=1 << 16)) as ranks:
        weights = ranks.weights(whole_tensors)
        weights.begin(V1, "no")
        shipment = weights.shipment(1, [None] * 3)
        shipment.stage(0)
        shipment.send(0)
        weights.seal()
        shipment.close()
    assert [sorted(of_rank) for of_rank in served.values()] == [["0", "1", "2"]] * 3
    assert all(len({of_rank[turn] for of_rank in served.values()}) == 3 for turn in range(3))


def test_a_rank_that_is_behind_is_named() -> None:
    sync = WeightSyncConfig(way="ipc", timeout_s=0.05)
    with TrainerRanks(named(0), 2, sync) as trainer:
        weights = trainer.weights(named(1))
        trainer.outlets[0].offer(shards_of(trainer.layout, 0, named(2)))
        with pytest.raises(RanksLost, match=r"rank 1 did not offer version 0\.2"):
            weights.begin(Version(0, 2), "no")


def test_strangers_direct_nothing() -> None:
    outlet = Outlet(1, WeightSyncConfig(way="ipc"), HOST, 1)
    server = OutletServer(outlet, HOST, "the token")
    try:
        stranger = RemoteOutlet(1, server.address, "another", 5, 5)
        with pytest.raises(RanksLost, match="rank 1"):
            stranger.seal()
        host, port = server.address.split(":")
        for length in (1 << 29, (1 << 64) - 1):  # of what a stranger says before it is known; nothing is allocated
            with socket.create_connection((host, int(port)), 5) as peer:
                peer.sendall(length.to_bytes(8, "big"))
                assert peer.recv(1) == b""
    finally:
        server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 5)


def test_a_fault_of_a_rank_is_no_failed_transfer() -> None:
    sync = WeightSyncConfig(way="ipc", timeout_s=5)
    with TrainerRanks(named(0), 2, sync) as trainer:
        weights = trainer.weights(named(1))
        weights.begin(Version(0, 1), "no")

        def out_of_memory(key: str, number: int) -> None:
            raise MemoryError

        trainer.outlets[1].stage = out_of_memory  # type: ignore[method-assign, assignment]
        shipment = weights.shipment(1, [None])
        with pytest.raises(RanksLost, match="rank 1 failed in stage"):
            shipment.stage(0)
        shipment.close()


async def test_a_version_that_is_published_again_is_copied_again(tmp_path: Path) -> None:
    sync, engine = sync_of("ipc", tmp_path), Engine()
    fleet = make_fleet(Directory(a=engine), sync=sync)
    with TrainerRanks(named(0), 2, sync) as trainer:
        for value in (1.0, 3.0):  # as if the first copy had been damaged
            await fleet.publish(Version(0, 1), trainer.weights(named(value)))
            assert engine.weights == {"a": 4.0 * value, "b": 4.0 * value}
        await fleet.close()


SYNC = WeightSyncConfig(way="ipc", timeout_s=30)


def outlets() -> list[Outlet]:
    """Of two ranks that have offered their shards."""
    made, layout = [Outlet(rank, SYNC, HOST, 30) for rank in range(2)], fsdp2(specs_of(named(1)), 2)
    for rank, outlet in enumerate(made):
        outlet.offer(shards_of(layout, rank, named(1)))
    return made


def test_a_rank_that_is_done_serves_rank_0_until_that_is_done_too() -> None:
    (mine, other), store, done = outlets(), dist.HashStore(), threading.Event()

    def follow() -> None:
        with followed(other, 1, HOST, TOKEN, store, 30):
            done.set()

    following = in_daemon_thread(follow, "rank 1")
    with led(mine, TOKEN, store, 2, 30, 30) as shards:
        assert done.wait(30)
        shards.begin(Version(0, 1), "no")
        shards.seal()  # as for an engine that came late
        assert not following.done()
    following.result(30)


def test_the_store_stays_until_the_slowest_rank_has_left() -> None:
    """Between hosts it is rank 0's, and ends with that."""
    (mine, other), begun = outlets(), threading.Event()
    store: list[dist.Store] = [listening_store(HOST, 0, 30)]
    joined = joined_store(HOST, store[0].port, 30)  # type: ignore[attr-defined]

    def follow() -> None:
        with followed(other, 1, HOST, TOKEN, joined, 30):
            begun.wait(30)
            time.sleep(0.3)  # the last lines of its records, say

    following = in_daemon_thread(follow, "rank 1")
    with led(mine, TOKEN, store[0], 2, 30, 30):
        begun.set()
    store.clear()
    following.result(30)


def test_a_rank_does_not_wait_for_ever() -> None:
    _, other = outlets()
    with pytest.raises(dist.DistStoreError), followed(other, 1, HOST, TOKEN, dist.HashStore(), 0.1):
        pass
    (mine, other), store = outlets(), dist.HashStore()
    with closing(OutletServer(other, HOST, TOKEN)) as server:
        store.set("outlets/1", server.address)
        with pytest.raises(dist.DistStoreError), led(mine, TOKEN, store, 2, 30, 0.1):
            pass


def test_a_rank_that_failed_leaves_at_once() -> None:
    _, other = outlets()
    with suppress(ZeroDivisionError), followed(other, 1, HOST, TOKEN, dist.HashStore(), 1e6):
        raise ZeroDivisionError
