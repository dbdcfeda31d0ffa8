"""Buckets hold tensors to the bit: whole, as deltas and as adapters."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.messages import Version
from rl_async.weight_sync.buckets import (
    CACHED,
    DELTA_BLOCK,
    SUM_BLOCK,
    SUMS,
    Bucket,
    Piece,
    _hex,
    adapter_buckets,
    add,
    allocate_buckets,
    apply_delta,
    as_adapters,
    checksum,
    checksum_like,
    deltas,
    manifest_bytes,
    numbered,
    sums,
    unpack,
    verify,
)
from rl_async.weight_sync.layout import TensorSpec, slices, whole
from rl_async.weight_sync.process_groups import GlooReceiver, GlooSender, NcclSender
from rl_async.weight_sync.protocol import DeviceMemory, InitInfo, TransportName, UpdateInfo
from rl_async.weight_sync.receiver import Assembler, RetainedBuckets, WeightReceiver
from rl_async.weight_sync.receiver import merged as receiver_merged
from rl_async.weight_sync.transports import (
    DiskSender,
    SharedMemoryReceiver,
    SharedMemorySender,
    bucket_device,
    new_segment,
)
from tests.support.rounding import assert_near, rounding
from tests.support.seed import examples
from tests.support.weights import Received, adapters, make_buckets, merged

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


DELTA_DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]
specs = st.lists(st.tuples(st.sampled_from(DELTA_DTYPES), st.integers(1, 300)), min_size=1, max_size=6)


def random_bits(spec: list[tuple[torch.dtype, int]], seed: int) -> list[tuple[str, torch.Tensor]]:
    """Any bit patterns, NaNs among them."""
    draw = np.random.default_rng(seed)
    return [
        (f"p{i}", torch.from_numpy(draw.integers(0, 256, n * dtype.itemsize, np.uint8)).view(dtype))
        for i, (dtype, n) in enumerate(spec)
    ]


def changed(named: list[tuple[str, torch.Tensor]], share: float, seed: int) -> list[tuple[str, torch.Tensor]]:
    """A copy in which about this share of the bytes differs."""
    draw = np.random.default_rng(seed)
    result = []
    for name, tensor in named:
        raw = tensor.clone().view(torch.uint8).numpy()
        raw[draw.random(len(raw)) < share] ^= 0x55
        result.append((name, torch.from_numpy(raw).view(tensor.dtype)))
    return result


def version(named: list[tuple[str, torch.Tensor]], step: int, max_bytes: int = 256) -> list[Bucket]:
    return list(numbered(list(make_buckets(named, max_bytes)), Version(0, step), "keep"))


def put(retained: RetainedBuckets, buckets: list[Bucket]) -> list[torch.Tensor]:
    return [retained.put(bucket.data, bucket.info).clone() for bucket in buckets]


@settings(max_examples=examples(100))
@given(specs, st.sampled_from([0.0, 0.01, 0.2, 1.0]), st.integers(8, 1000))
def test_the_result_is_the_new_version_bit_by_bit_and_no_bucket_grows(
    spec: list[tuple[torch.dtype, int]], share: float, max_bytes: int
) -> None:
    named = random_bits(spec, 0)
    old, new = version(named, 0, max_bytes), version(changed(named, share, 1), 1, max_bytes)
    sent = list(deltas(new, old, "0.0"))
    assert all(s.nbytes <= n.nbytes for s, n in zip(sent, new, strict=True))
    retained = RetainedBuckets()
    put(retained, old)
    wire = [Bucket(b.data.clone(), msgspec.json.decode(msgspec.json.encode(b.info), type=UpdateInfo)) for b in sent]
    assert all(torch.equal(got, bucket.data) for got, bucket in zip(put(retained, wire), new, strict=True))
    assert retained.version == "0.1"


def test_what_did_not_change_is_not_sent() -> None:
    weight = torch.zeros(3 * DELTA_BLOCK, dtype=torch.bfloat16)
    touched = weight.clone()
    touched[[5, DELTA_BLOCK, 3 * DELTA_BLOCK - 1]] = 1.0
    (old,), (new,) = version([("w", weight)], 0, 1 << 30), version([("w", touched)], 1, 1 << 30)
    (sent,) = deltas([new], [old], "0.0")
    assert (sent.info.kind, sent.info.base, sent.nbytes) == ("delta", "0.0", 3 * 4 + 3 * (2 + 2))
    data = old.data.clone()
    apply_delta(sent.data, data, sent.info)
    assert torch.equal(data, new.data)


def test_a_sign_of_zero_and_another_nan_are_changes() -> None:
    before, after = torch.zeros(100), torch.zeros(100)
    after[3] = -0.0
    before[4] = after[4] = torch.nan
    (old,), (new,) = version([("w", before)], 0, 1 << 20), version([("w", after)], 1, 1 << 20)
    (sent,) = deltas([new], [old], "0.0")
    assert sent.nbytes == 4 + 2 + 4


def test_buckets_of_another_shape_are_sent_whole() -> None:
    old, new = version([("w", torch.zeros(64))], 0), version([("w", torch.zeros(8, 8)), ("v", torch.zeros(64))], 1)
    assert [bucket.info.kind for bucket in deltas(new, old, "0.0")] == ["full", "full"]


def test_a_delta_against_another_version_is_refused() -> None:
    named = random_bits([(torch.float32, 60)], 0)
    old, new = version(named, 0), version(changed(named, 0.01, 1), 1)
    (sent,) = deltas(new, old, "0.0")
    retained = RetainedBuckets()
    with pytest.raises(WeightSyncError, match=r"version 0\.0"):
        retained.put(sent.data, sent.info)
    put(retained, version(named, 7))
    with pytest.raises(WeightSyncError, match=r"version 0\.0.* 0\.7"):
        retained.put(sent.data, sent.info)


def test_after_a_damaged_delta_only_a_full_update_is_taken() -> None:
    named = random_bits([(torch.float32, 60)], 0)
    old, new = version(named, 0), version(changed(named, 0.01, 1), 1)
    (sent,) = deltas(new, old, "0.0")
    retained = RetainedBuckets()
    put(retained, old)
    damaged = sent.data.clone()
    damaged[-1] ^= 1
    with pytest.raises(WeightSyncError, match="checksum"):
        retained.put(damaged, sent.info)
    with pytest.raises(WeightSyncError, match=r"version 0\.0, .* no complete version"):
        retained.put(sent.data, sent.info)
    assert torch.equal(put(retained, new)[0], new[0].data)


@pytest.mark.parametrize("cut", [0, 3, 5])
def test_a_payload_that_does_not_fit_is_refused(cut: int) -> None:
    named = random_bits([(torch.float32, 60)], 0)
    old, new = version(named, 0), version(changed(named, 0.02, 1), 1)
    (sent,) = deltas(new, old, "0.0")
    with pytest.raises(WeightSyncError, match="'p0'"):
        apply_delta(sent.data[:cut], old[0].data.clone(), sent.info)


def test_a_change_beyond_the_end_is_refused() -> None:
    old, new = version([("w", torch.zeros(60))], 0), version([("w", torch.ones(60))], 1)
    payload = torch.tensor([1, 0, 0, 0, 60, 0, 1, 2, 3, 4], dtype=torch.uint8)  # the 61st unit
    with pytest.raises(WeightSyncError, match="'w'"):
        apply_delta(payload, old[0].data.clone(), new[0].info)


def test_a_version_is_complete_only_with_all_its_buckets_in_order() -> None:
    buckets, retained = version(random_bits([(torch.float32, 200)], 0), 3), RetainedBuckets()
    retained.put(buckets[0].data, buckets[0].info)
    with pytest.raises(WeightSyncError, match=r"0\.3"):
        retained.load("0.3", lambda _: None)
    with pytest.raises(WeightSyncError, match=r"bucket 2 of .*0\.3.* bucket 1 of .*0\.3"):
        retained.put(buckets[2].data, buckets[2].info)
    put(retained, buckets)
    loaded: list[torch.Tensor] = []
    retained.load("0.3", lambda pieces: loaded.extend(piece.data for piece in pieces))
    assert torch.equal(
        torch.cat(loaded).view(torch.int32), random_bits([(torch.float32, 200)], 0)[0][1].view(torch.int32)
    )


SCALE, RANK = 1.7, 5
SHAPES = {"up.weight": (48, 20), "norm.weight": (20,), "down.weight": (20, 48)}


def base(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()}


def pair(shape: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank]."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(RANK, shape[1], generator=draw), torch.randn(shape[0], RANK, generator=draw)


def trained(seed: int = 1) -> dict[str, Tensor]:
    return adapters(base().items(), ("up", "down"), seed, RANK)


def publication(
    weights: dict[str, Tensor], named: dict[str, Tensor], step: int = 0, max_bytes: int = 1 << 20
) -> list[Bucket]:
    """The base and what is added to it, as they travel."""
    added = as_adapters(make_buckets(named.items(), max_bytes), SCALE)
    addressed = numbered([*make_buckets(weights.items(), max_bytes), *added], Version(0, step), "no")
    return [Bucket(b.data, msgspec.json.decode(msgspec.json.encode(b.info), type=UpdateInfo)) for b in addressed]


def bits_of(named: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: tensor.reshape(-1).view(torch.uint8).tolist() for name, tensor in named.items()}


def test_the_sum_is_that_of_the_formula() -> None:
    weight = base(dtype=torch.float32)["up.weight"]
    low, high = pair((48, 20), 3)
    expected = weight.double() + SCALE * (high.double() @ low.double())
    size = weight.double().abs() + SCALE * (high.double().abs() @ low.double().abs())
    assert_near(add(weight, low, high, SCALE), expected, rounding(size, terms=RANK + 1))
    assert add(weight.bfloat16(), low, high, SCALE).dtype == torch.bfloat16


def test_a_row_has_the_same_bits_alone_and_in_a_matrix_of_several_blocks() -> None:
    wide = CACHED // 3
    low, high = pair((7, wide), 4)
    weight = torch.randn(7, wide, generator=torch.Generator().manual_seed(5)).bfloat16()
    whole = add(weight, low, high, SCALE)
    for row in range(7):
        (by_itself,) = add(weight[row : row + 1], low, high[row : row + 1], SCALE)
        assert torch.equal(whole[row], by_itself)


@settings(max_examples=examples(30))
@given(st.integers(4, 5000), st.sampled_from([torch.bfloat16, torch.float32]))
def test_an_engine_ends_with_the_bits_of_merged_weights(max_bytes: int, dtype: torch.dtype) -> None:
    weights, engine = base(dtype=dtype), Received()
    for step in range(3):  # each from the base anew
        named = trained(step)
        sent = publication(weights, named, step, max_bytes)
        found = engine.take(sent if step == 0 else adapter_buckets(sent))
        assert bits_of(found) == bits_of(dict(merged(weights.items(), named, SCALE)))


def test_adapters_for_another_base_are_refused_and_both_are_named() -> None:
    sent, other = publication(base(0), trained()), publication(base(1), trained())
    name, held = adapter_buckets(sent)[0].info.base, adapter_buckets(other)[0].info.base
    assert name != held
    engine = Received()
    with pytest.raises(WeightSyncError, match=name):
        engine.take(adapter_buckets(sent))
    engine.take(other)
    with pytest.raises(WeightSyncError, match=f"{name}.*{held}"):
        engine.take(adapter_buckets(sent))


def test_a_base_has_another_name_with_other_names_of_its_weights() -> None:
    weights, names = base(), []
    for renamed in (weights, {f"model.{name}": tensor for name, tensor in weights.items()}):
        names.append(publication(renamed, trained())[-1].info.base)
    assert names[0] != names[1]


def test_damaged_adapters_are_refused_and_nothing_is_loaded() -> None:
    engine, weights = Received(), base()
    before = bits_of(engine.take(publication(weights, trained(1))))
    (damaged,) = adapter_buckets(publication(weights, trained(2), 1))
    damaged.data[0] ^= 1
    with pytest.raises(WeightSyncError, match="checksum"):
        engine.take([damaged])
    engine.receiver.finish()
    assert bits_of(engine.weights) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"up.lora_A.weight": None}, "up.lora_A.weight"),
        ({"up.lora_A.weight": torch.zeros(RANK, 19)}, r"up.weight .*\[48, 20\], .*A \[5, 19\]"),
        ({"up.lora_B.weight": torch.zeros(48, 4)}, r"up.weight .*\[48, 20\], .*B \[48, 4\]"),
        (
            {"no.lora_A.weight": torch.zeros(RANK, 2), "no.lora_B.weight": torch.zeros(2, RANK)},
            "no.weight",
        ),
    ],
)
def test_adapters_that_do_not_fit_their_base_are_refused(change: dict[str, Tensor | None], message: str) -> None:
    named = {name: tensor for name, tensor in (trained() | change).items() if tensor is not None}
    with pytest.raises(WeightSyncError, match=message):
        Received().take(publication(base(), named))


WORD = (1 << 64) - 1


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def factor(number: int) -> int:
    """SplitMix64's output with this number, as published, made odd."""
    z = (number + 1) * 0x9E3779B97F4A7C15 & WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return (z ^ z >> 31) | 1


def expected(data: bytes) -> str:
    """Both sums with Python's own integers."""
    first = second = len(data)
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    for at, word in enumerate(words):
        weight = factor(at % SUM_BLOCK) * factor(SUM_BLOCK + at // SUM_BLOCK)
        upper = (word >> 32) - (1 << 32 if word >> 63 else 0)  # words have a sign
        first, second = first + weight * word & WORD, second + weight * upper & WORD
    return f"{SUMS}{first:016x}{second:016x}"


@pytest.mark.parametrize(
    "count", [0, 1, 7, 8, 9, 8 * SUM_BLOCK - 1, 8 * SUM_BLOCK, 8 * SUM_BLOCK + 1, 16 * SUM_BLOCK + 803]
)
def test_the_sums_are_what_is_documented(count: int) -> None:
    data = random_bytes(count)
    assert checksum_like(SUMS, data) == expected(data.numpy().tobytes())


def test_the_host_uses_plain_xxh3_128() -> None:
    assert checksum(torch.tensor([], dtype=torch.uint8)) == "99aa06d3014798d86001c324468d497f"  # published test vector


@settings(max_examples=examples(200))
@given(st.integers(1, 100), st.data())
def test_any_flipped_bit_is_found(count: int, draw: st.DataObject) -> None:
    data = random_bytes(count)
    before = sums(data)
    data[draw.draw(st.integers(0, count - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    assert not torch.equal(sums(data), before)


@settings(max_examples=examples(200))
@given(st.integers(0, 63), st.integers(1, 6), st.integers(0, 1000))
@example(63, 2, 0)
def test_the_same_bit_flipped_in_several_words_is_found(bit: int, words: int, seed: int) -> None:
    """The upper bits of products are lost modulo 2^64: without the second sum, two of them would cancel out."""
    data = random_bytes(64, seed)
    before = sums(data)
    data.view(torch.int64)[:words] ^= 1 << bit if bit < 63 else -(1 << 63)
    assert not torch.equal(sums(data), before)


@pytest.mark.parametrize(
    ("one", "other"),
    [((0, 8), (8, 16)), ((0, 4), (4, 8)), ((0, 8), (8 * SUM_BLOCK, 8 * SUM_BLOCK + 8)), ((0, 1), (2, 3))],
)
def test_parts_that_changed_places_are_found(one: tuple[int, int], other: tuple[int, int]) -> None:
    data = random_bytes(16 * SUM_BLOCK)
    swapped = data.clone()
    swapped[slice(*one)], swapped[slice(*other)] = data[slice(*other)], data[slice(*one)]
    assert not torch.equal(sums(swapped), sums(data))


def test_zeros_are_not_any_number_of_zeros() -> None:
    found = {checksum_like(SUMS, torch.zeros(count, dtype=torch.uint8)) for count in (1, 2, 8, 16, 8 * SUM_BLOCK)}
    assert len(found) == 5


def test_a_view_has_the_checksum_of_its_own_bytes() -> None:
    data = random_bytes(1000)
    for start in (0, 3, 8):
        assert torch.equal(sums(data[start:]), sums(data[start:].clone()))
        assert checksum(data[start:]) == checksum(data[start:].clone())


def test_the_kind_that_is_expected_is_computed() -> None:
    data = random_bytes(100)
    assert checksum_like(checksum(data), data) == checksum(data)
    assert checksum_like(_hex(sums(data)), data) == _hex(sums(data)) != checksum(data)


# The receiving side: what it hands to the engine, and what it refuses.


NAMED = [("a", torch.arange(4.0)), ("b", torch.ones(2, 3, dtype=torch.bfloat16))]


def test_pieces_that_divide_makes_are_boxes() -> None:
    whole = torch.arange(3 * 4 * 5, dtype=torch.float32).view(3, 4, 5)
    for max_bytes in (8, 20, 44, 80, 1000):
        found = torch.zeros_like(whole)
        for bucket in make_buckets([("a", whole)], max_bytes):
            for piece in unpack(bucket.data, bucket.info):
                for box, part in piece.parts():
                    found[tuple(slice(*span) for span in box)] = part
        assert found.equal(whole)
    with pytest.raises(WeightSyncError, match="no box"):
        list(Piece("a", (3, 4), 2, torch.zeros(4)).parts())


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
    with pytest.raises(WeightSyncError, match=r"weight_sync\.way=nccl"):
        NcclSender((1,), "none", 1.0)
    with pytest.raises(WeightSyncError, match=r"weight_sync\.way=nccl"):
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
    assert (
        [found.name for found in receiver_merged([one, other])]
        == [found.name for found in receiver_merged([other, one])]
        == expected
    )
