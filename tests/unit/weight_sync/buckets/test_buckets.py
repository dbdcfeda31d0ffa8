"""Buckets: round trips for any mix of types and shapes, bounds, and what is refused."""

import dataclasses
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_async.errors import WeightSyncError
from rl_async.messages import Version
from rl_async.weight_sync.buckets import allocate_buckets, manifest_bytes, numbered, unpack, verify
from rl_async.weight_sync.layout import TensorSpec, slices, whole
from rl_async.weight_sync.receiver import Assembler
from tests.support.buckets import make_buckets
from tests.support.effort import examples

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool]
parameters = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=12)


def tensors(spec: list[tuple[torch.dtype, list[int]]]) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (f"p{i}", torch.randint(0, 2, shape, generator=generator).to(dtype)) for i, (dtype, shape) in enumerate(spec)
    ]


@settings(max_examples=examples(100))
@given(parameters, st.integers(8, 400))
def test_every_tensor_comes_back_in_order_and_no_bucket_is_above_the_bound(
    spec: list[tuple[torch.dtype, list[int]]], max_bytes: int
) -> None:
    named = tensors(spec)
    back: list[tuple[str, torch.Tensor]] = []
    assemble = Assembler(lambda done: back.extend((name, tensor.clone()) for name, tensor in done))
    for bucket in make_buckets(named, max_bytes):
        info = msgspec.json.decode(msgspec.json.encode(bucket.info), type=type(bucket.info))
        verify(bucket.data, info)
        assert bucket.nbytes == manifest_bytes(info) <= max_bytes
        assemble(unpack(bucket.data.clone(), info))
    assert [name for name, _ in back] == [name for name, _ in named]
    for (_, sent), (_, received) in zip(named, back):
        assert sent.dtype == received.dtype
        assert torch.equal(sent, received)


def test_only_a_tensor_larger_than_the_bound_is_cut_and_its_end_shares_a_bucket() -> None:
    named = [("small", torch.ones(2)), ("fits", torch.ones(8)), ("huge", torch.ones(2, 9)), ("last", torch.ones(2))]
    found = [(b.info.names, b.info.starts, b.info.numels) for b in make_buckets(named, 32)]
    assert found == [
        (["small"], [], []),
        (["fits"], [], []),
        (["huge"], [0], [8]),
        (["huge"], [8], [1]),  # a box: no piece has the end of one row and the beginning of another
        (["huge"], [9], [8]),
        (["huge", "last"], [17, 0], [1, 2]),
    ]


def test_rows_that_fit_stay_whole() -> None:
    (room, *_) = allocate_buckets({"w": TensorSpec((5, 2, 3), "float32")}, 60)
    assert [(box, tuple(place.shape)) for _, box, place in room.boxes] == [(((0, 2), (0, 2), (0, 3)), (2, 2, 3))]


def test_a_room_is_sealed_with_what_was_written_into_it() -> None:
    weight = torch.arange(24.0).reshape(4, 6)
    rooms = allocate_buckets({"w": TensorSpec((4, 6), "float32")}, 50)
    for room in rooms:
        for _, box, place in room.boxes:
            place.copy_(weight[slices(box, whole((4, 6)))])
    for room, bucket in zip(rooms, make_buckets([("w", weight)], 50), strict=True):
        assert room.seal().info == bucket.info
        assert torch.equal(room.data, bucket.data)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([1], "'w' .* 4 .* 0 "),
        ([0, 2], "'w' .* 8 .* 4 .*'w'"),
        ([0, 1, 1], "'w' .* 4 .* 8 .*'w'"),
    ],
)
def test_pieces_out_of_order_are_refused(order: list[int], message: str) -> None:
    buckets = make_buckets([("w", torch.arange(10.0))], 16)
    assemble = Assembler(lambda _: None)
    with pytest.raises(WeightSyncError, match=message):
        for index in order:
            assemble(unpack(buckets[index].data, buckets[index].info))


def test_a_parameter_that_was_left_unfinished_is_forgotten() -> None:
    got: list[torch.Tensor] = []
    assemble = Assembler(lambda done: got.extend(tensor.clone() for _, tensor in done))
    old, new = (make_buckets([("w", torch.full((10,), value))], 16) for value in (1.0, 2.0))
    for bucket in [*old[:2], *new]:
        assemble(unpack(bucket.data, bucket.info))
    assert [tensor.tolist() for tensor in got] == [[2.0] * 10]


def test_buckets_are_copies() -> None:
    weight = torch.zeros(4)
    (bucket,) = make_buckets([("a", weight)], 16)
    weight.fill_(1.0)
    assert unpack(bucket.data, bucket.info)[0].data.tolist() == [0.0] * 4


def test_transposed_and_trained_tensors_are_packed_in_their_logical_order() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)).t()
    (bucket,) = make_buckets([("w", weight)], 1 << 10)
    (piece,) = unpack(bucket.data, bucket.info)
    assert torch.equal(piece.data.view(piece.shape), weight.detach())


def test_a_flipped_bit_is_noticed() -> None:
    (bucket,) = make_buckets([("w", torch.arange(6.0))], 1 << 10)
    bucket.data[3] ^= 1
    with pytest.raises(WeightSyncError, match=r"'w'.* checksum"):
        verify(bucket.data, bucket.info)


def test_a_bucket_that_moved_to_the_host_still_tells_where_it_was_filled() -> None:
    (bucket,) = make_buckets([("w", torch.arange(6.0))], 1 << 10)
    elsewhere = dataclasses.replace(bucket, data=bucket.data.to("meta"))
    assert elsewhere.device.type == "meta"
    back = dataclasses.replace(bucket, home=elsewhere.device).offloaded()
    (labelled,) = numbered([back], Version(0, 1), "keep")
    assert (labelled.device.type, labelled.data.device.type) == ("meta", "cpu")
    assert bucket.offloaded().data is bucket.data  # nothing is copied on a CPU


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shapes": [[7]]}, "24 bytes.* 28"),
        ({"names": []}, "0 names, 1 dtypes"),
        ({"dtype_names": ["Tensor"]}, "'Tensor'"),
        *(({"dtype_names": [name]}, f"'{name}'") for name in ("qint8", "complex64", "bits8")),
        ({"shapes": [[1 << 40, 1 << 40]]}, str(1 << 80)),
        ({"starts": [0]}, "1 starts and 0 numels"),
        ({"starts": [4], "numels": [6]}, "4 to 10 of 'w'"),
        ({"starts": [-1], "numels": [6]}, "-1 to 5 of 'w'"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    (bucket,) = make_buckets([("w", torch.arange(6.0))], 1 << 10)
    with pytest.raises(WeightSyncError, match=message):
        unpack(bucket.data, msgspec.structs.replace(bucket.info, **change))


def test_a_bucket_must_be_able_to_hold_something() -> None:
    with pytest.raises(ValueError, match="not 0"):
        make_buckets([("w", torch.ones(1))], 0)
    with pytest.raises(ValueError, match=r"3 bytes.* w \(4 bytes\)"):
        make_buckets([("w", torch.ones(1))], 3)
