"""The receiving side: what it hands to the engine, and what it refuses."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets import Piece
from rl_async.weight_sync.protocol import DeviceMemory, InitInfo, TransportName, UpdateInfo
from rl_async.weight_sync.receiver import WeightReceiver, merged
from rl_async.weight_sync.transports.disk import DiskSender
from rl_async.weight_sync.transports.interface import bucket_device
from rl_async.weight_sync.transports.ipc import SharedMemoryReceiver, SharedMemorySender, new_segment
from rl_async.weight_sync.transports.process_groups import GlooReceiver, GlooSender, NcclSender
from tests.support.weights import make_buckets

NAMED = [("a", torch.arange(4.0)), ("b", torch.ones(2, 3, dtype=torch.bfloat16))]


@pytest.fixture
def staged() -> Iterator[UpdateInfo]:
    """A bucket in shared memory, and its manifest."""
    sender = SharedMemorySender()
    (bucket,) = make_buckets(NAMED, 1 << 10)
    yield sender.stage(bucket)
    sender.close()


def receive(staged: UpdateInfo, load: Callable[[list[Piece]], None]) -> None:
    receiver = WeightReceiver(load)
    receiver.init(InitInfo(backend="ipc"))
    receiver.update(staged)


def test_the_loader_gets_the_tensors() -> None:
    loaded: dict[str, torch.Tensor] = {}
    sender = SharedMemorySender()
    (bucket,) = make_buckets(NAMED, 1 << 10)
    staged = sender.stage(bucket)
    receive(staged, lambda named: loaded.update((p.name, p.data.view(p.shape).clone()) for p in named))
    sender.close()
    assert not Path("/dev/shm", staged.shm_name).exists()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in NAMED)


def zero(pieces: list[Piece]) -> None:
    for piece in pieces:
        piece.data.zero_()


def test_a_loader_cannot_change_the_bytes_of_other_engines(staged: UpdateInfo) -> None:
    others: list[list[float]] = []
    receive(staged, zero)
    receive(staged, lambda pieces: others.append(pieces[0].data.tolist()))
    assert others == [[0.0, 1.0, 2.0, 3.0]]


def test_nothing_is_loaded_if_the_checksum_differs(staged: UpdateInfo) -> None:
    loaded: list[Piece] = []
    with pytest.raises(WeightSyncError, match="checksum"):
        receive(msgspec.structs.replace(staged, checksum="0" * 32), loaded.extend)
    assert loaded == []


@pytest.mark.parametrize("name", ["", "../etc/passwd", "psm_missing"])
def test_a_segment_that_is_not_there_is_refused(staged: UpdateInfo, name: str) -> None:
    with pytest.raises(WeightSyncError, match="shared memory"):
        receive(msgspec.structs.replace(staged, shm_name=name), lambda _: None)


def test_a_manifest_larger_than_its_segment_is_refused(staged: UpdateInfo) -> None:
    with pytest.raises(WeightSyncError, match="shared memory"):
        receive(msgspec.structs.replace(staged, shapes=[[1 << 20], [2, 3]]), lambda _: None)


def test_an_update_needs_an_init(staged: UpdateInfo) -> None:
    with pytest.raises(WeightSyncError, match="before the engine joined"):
        WeightReceiver(lambda _: None).update(staged)


def test_gloo_gives_up_at_the_deadline_when_nobody_comes() -> None:
    with pytest.raises(WeightSyncError, match="gloo"):
        GlooSender((1,), "lonely", 0.3).connect()


def test_a_closed_sender_cannot_connect() -> None:
    sender = GlooSender((1,), "late", 30)
    sender.close()
    with pytest.raises(WeightSyncError, match="late"):
        sender.connect()


def test_gloo_gives_up_when_there_is_no_store() -> None:
    # The sender is dropped at once, and its store with it.
    info = msgspec.structs.replace(GlooSender((1,), "gone", 30).init_info(0), timeout_s=0.3)
    with pytest.raises(WeightSyncError, match=f"127.0.0.1:{info.master_port}"):
        GlooReceiver(info)


@pytest.fixture
def written(tmp_path: Path) -> Iterator[tuple[InitInfo, UpdateInfo]]:
    """A bucket in a file: how to join, and its manifest."""
    sender = DiskSender(tmp_path / "weights")
    (bucket,) = make_buckets(NAMED, 1 << 10)
    yield sender.init_info(0), sender.stage(bucket)
    sender.close()


def test_a_file_is_plain_safetensors_and_nothing_unfinished_is_left(written: tuple[InitInfo, UpdateInfo]) -> None:
    init, staged = written
    assert [path.name for path in Path(init.folder).iterdir()] == [staged.file]
    (bucket,) = make_buckets(NAMED, 1 << 10)
    assert torch.equal(load_file(Path(init.folder, staged.file))["bucket"], bucket.data)


def test_what_a_killed_trainer_left_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "old.safetensors").write_bytes(b"old")
    sender = DiskSender(tmp_path)
    assert list(tmp_path.iterdir()) == []
    sender.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": ""}, "''"),
        ({"file": "../000000.safetensors"}, "'../000000.safetensors'"),
        ({"file": "000007.safetensors"}, "000007.safetensors"),
        ({"shapes": [[5], [2, 3]]}, "28 bytes.* 32"),
        ({"checksum": "0" * 32}, "checksum"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    written: tuple[InitInfo, UpdateInfo], change: dict[str, Any], message: str
) -> None:
    init, staged = written
    receiver = WeightReceiver(lambda _: None)
    receiver.init(init)
    with pytest.raises(WeightSyncError, match=message):
        receiver.update(msgspec.structs.replace(staged, **change))


def test_a_damaged_file_is_refused(written: tuple[InitInfo, UpdateInfo]) -> None:
    init, staged = written
    path = Path(init.folder, staged.file)
    path.write_bytes(path.read_bytes()[:-3])
    receiver = WeightReceiver(lambda _: None)
    receiver.init(init)
    with pytest.raises(WeightSyncError, match=r"000000\.safetensors"):
        receiver.update(staged)


def test_nccl_without_a_gpu_says_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WeightSyncError, match=r"weight_sync\.transport=nccl"):
        NcclSender((1,), "none", 1.0)
    with pytest.raises(WeightSyncError, match=r"weight_sync\.transport=nccl"):
        WeightReceiver(lambda _: None).init(InitInfo(backend="nccl"))


def test_a_segment_for_which_there_is_no_room_is_an_error_and_not_a_signal() -> None:
    nbytes = shutil.disk_usage("/dev/shm").total + 12288
    with pytest.raises(WeightSyncError, match=rf"{nbytes} bytes.*--shm-size"):
        new_segment(nbytes)
    left = []
    for path in Path("/dev/shm").iterdir():
        with suppress(FileNotFoundError):  # of another process
            left.append(path.stat().st_size)
    assert nbytes not in left


def test_two_pieces_of_memory_are_used_in_turns_and_none_after_the_end() -> None:
    sender = SharedMemorySender()
    (bucket,) = make_buckets(NAMED, 1 << 10)
    staged = []
    for _ in range(4):
        staged += [sender.stage(bucket), sender.stage(bucket)]
        sender.unstage()
        sender.unstage()
    names = {info.shm_name for info in staged}
    assert len(names) == 2 and all(Path("/dev/shm", name).exists() for name in names)
    sender.close()
    with pytest.raises(WeightSyncError, match="closed"):
        sender.stage(bucket)
    assert not any(Path("/dev/shm", name).exists() for name in names)


def test_memory_stays_mapped_from_bucket_to_bucket() -> None:
    sender, receiver = SharedMemorySender(), SharedMemoryReceiver(InitInfo(backend="ipc"))
    found: list[tuple[int, list[float]]] = []
    for number in range(4):
        (bucket,) = make_buckets([("w", torch.full((10,), float(number)))], 1 << 10)
        data = receiver.receive(sender.stage(bucket))
        found.append((data.data_ptr(), data.view(torch.float32).tolist()))
        sender.unstage()
    assert len({place for place, _ in found}) == 1
    assert [values for _, values in found] == [[float(number)] * 10 for number in range(4)]
    receiver.close()
    sender.close()


def test_a_larger_bucket_gets_larger_memory_in_place_of_the_old() -> None:
    sender = SharedMemorySender()
    small, large = (make_buckets([("w", torch.arange(float(count)))], 1 << 10)[0] for count in (10, 100))
    before = sender.stage(small)
    sender.unstage()
    loaded: list[torch.Tensor] = []
    receive(sender.stage(large), lambda pieces: loaded.extend(piece.data.clone() for piece in pieces))
    assert not Path("/dev/shm", before.shm_name).exists()
    sender.unstage()
    receive(sender.stage(small), lambda pieces: loaded.extend(piece.data.clone() for piece in pieces))
    sender.close()
    assert [tensor.tolist() for tensor in loaded] == [list(range(100)), list(range(10))]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device, which the handles do not name")
def test_each_worker_opens_the_export_that_was_made_for_it(staged: UpdateInfo) -> None:
    sender = SharedMemorySender((2, 1))
    ranks = [sender.init_info(member).rank_offset for member in range(2)]
    assert ranks == [0, 2]
    exports = [
        DeviceMemory(
            device=f"GPU-{rank}",
            handle=b"h",
            nbytes=64,
            offset=0,
            counter=b"c",
            counter_offset=rank,
            event=b"",
            wait=False,
        )
        for rank in range(3)
    ]
    info = msgspec.structs.replace(staged, shm_name="", device_memory=exports)
    for rank in range(3):
        with pytest.raises(WeightSyncError, match=f"device GPU-{rank}"):
            SharedMemoryReceiver(InitInfo(backend="ipc", rank_offset=rank)).receive(info)
    with pytest.raises(WeightSyncError, match="3 workers, and this has rank 3"):
        SharedMemoryReceiver(InitInfo(backend="ipc", rank_offset=3)).receive(info)
    sender.close()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device, which the handle does not name")
def test_memory_of_a_device_that_this_engine_does_not_see_is_refused(staged: UpdateInfo) -> None:
    memory = DeviceMemory(
        device="GPU-0", handle=b"h", nbytes=64, offset=0, counter=b"c", counter_offset=0, event=b"", wait=False
    )
    manifest = msgspec.json.encode(msgspec.structs.replace(staged, shm_name="", device_memory=[memory]))
    info = msgspec.json.decode(manifest, type=UpdateInfo)
    assert info.device_memory == [memory]
    with pytest.raises(WeightSyncError, match=r"device GPU-0.* none.*nccl, gloo or disk"):
        receive(info, lambda _: None)
    with pytest.raises(WeightSyncError, match="1024 bytes in device memory of 64"):
        receive(msgspec.structs.replace(info, shapes=[[250], [2, 6]]), lambda _: None)


@pytest.mark.parametrize(
    ("transport", "device", "place"),
    [
        ("nearest", "cuda:1", "cpu"),
        ("gloo", "cuda:1", "cpu"),
        ("disk", "cuda:1", "cpu"),
        ("ipc", "cuda:1", "cuda:1"),
        ("ipc", "npu:0", "cpu"),
        ("ipc", "cpu", "cpu"),
        ("nccl", "cuda:1", "cuda:1"),
    ],
)
def test_buckets_are_filled_where_the_transport_takes_them(transport: TransportName, device: str, place: str) -> None:
    assert bucket_device(transport, device) == place


@pytest.mark.parametrize("folder", ["missing", "x" * 50_000, "a\0b"])
def test_a_folder_that_cannot_be_is_an_error_of_the_transfer(folder: str, tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError):
        WeightReceiver(lambda _: None).init(InitInfo(backend="disk", folder=str(tmp_path / folder)))


@pytest.mark.parametrize(
    "wrong", [{"master_port": 1 << 31}, {"master_port": -1}, {"world_size": -1}, {"timeout_s": 1e300}]
)
def test_numbers_that_no_group_can_have_are_refused_as_a_message(wrong: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"backend": "gloo", **wrong}, InitInfo)


def test_workers_complete_layers_in_the_same_order_whoever_sends_them() -> None:
    def piece(name: str, start: int = 0, count: int = 4) -> Piece:
        return Piece(name, (8,), start, torch.zeros(count), (), 8 if name in ("begun", "unfinished") else 4)

    one, other = [piece("a"), piece("unfinished")], [piece("c"), piece("b"), piece("begun", 4)]
    expected = ["begun", "a", "b", "c", "unfinished"]
    assert [found.name for found in merged([one, other])] == [found.name for found in merged([other, one])] == expected
