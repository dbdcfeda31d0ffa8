"""Which rank sends what: each worker gets exactly what it needs, in as few bytes as any transfer could."""

from collections.abc import Mapping, Sequence
from itertools import product

import msgspec
import pytest
import torch
from torch import Tensor

from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import WeightSyncError
from rl_async.messages import Version
from rl_async.weight_sync.buckets import unpack, wire_bytes
from rl_async.weight_sync.layout import Layout, Shard, TensorSpec, cut, engine, fsdp2, shards_of, slices, volume, whole
from rl_async.weight_sync.protocol import Hold, UpdateInfo, of_worker
from rl_async.weight_sync.receiver import Assembler, WeightReceiver
from rl_async.weight_sync.reshard import plan
from rl_async.weight_sync.sender import Needs, plan_rounds
from tests.support.trainer_ranks import TrainerRanks, specs_of
from tests.unit.weight_sync.reshard.models import specs

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

    return Layout(named, {name: shards_of(held(spec.shape)) for name, spec in named.items()})


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


@pytest.mark.parametrize("hold", ["no", "stage"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bucket_bytes", [16, 70, 1 << 20])
def test_workers_get_their_boxes_in_place_and_nothing_else(layout: str, bucket_bytes: int, hold: Hold) -> None:
    sync = WeightSyncConfig(transport="ipc", bucket_bytes=bucket_bytes, timeout_s=30)
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
    minimal = plan(trainer, wanted, 1 << 20).figures.minimal
    weights = {name: torch.randn(spec.shape).to(torch.bfloat16) for name, spec in named.items()}
    with TrainerRanks(weights, ranks, WeightSyncConfig(transport="ipc", bucket_bytes=1 << 16)) as trainers:
        _, _, sent = received(trainers, V1, weights, needs, "no")
    assert minimal <= sent <= 1.05 * minimal < tp * sum(tensor.nbytes for tensor in weights.values())


@pytest.mark.parametrize("box", [((0, 7), (0, 4)), ((3, 3), (0, 4)), ((0, 3),), ((0, 3), (0, 4))])
def test_boxes_that_do_not_fit_their_tensor_are_refused(box: tuple[tuple[int, int], ...]) -> None:
    named = tensors()
    with TrainerRanks(named, 1, WeightSyncConfig(transport="ipc", bucket_bytes=1 << 20)) as ranks:
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
    with TrainerRanks(named, 1, WeightSyncConfig(transport="ipc", bucket_bytes=1 << 20)) as ranks:
        _, infos, _ = received(ranks, V1, named, [NEEDS[1]], "no")
    info = infos[0][0]
    data = torch.zeros(sum(4 * numel for numel in info.numels), dtype=torch.uint8)
    with pytest.raises(WeightSyncError, match="which has"):
        unpack(data, msgspec.structs.replace(info, totals=[total - 1 for total in info.totals]))
