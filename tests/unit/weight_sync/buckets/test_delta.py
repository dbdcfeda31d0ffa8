"""Deltas: exact for any bits, never larger than the bucket, refused for another base."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_async.errors import WeightSyncError
from rl_async.messages import Version
from rl_async.weight_sync.buckets import DELTA_BLOCK, Bucket, apply_delta, deltas, numbered
from rl_async.weight_sync.protocol import UpdateInfo
from rl_async.weight_sync.receiver import RetainedBuckets
from tests.support.buckets import make_buckets
from tests.support.effort import examples

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]
specs = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 300)), min_size=1, max_size=6)


def bits(spec: list[tuple[torch.dtype, int]], seed: int) -> list[tuple[str, torch.Tensor]]:
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
    named = bits(spec, 0)
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
    named = bits([(torch.float32, 60)], 0)
    old, new = version(named, 0), version(changed(named, 0.01, 1), 1)
    (sent,) = deltas(new, old, "0.0")
    retained = RetainedBuckets()
    with pytest.raises(WeightSyncError, match=r"version 0\.0"):
        retained.put(sent.data, sent.info)
    put(retained, version(named, 7))
    with pytest.raises(WeightSyncError, match=r"version 0\.0.* 0\.7"):
        retained.put(sent.data, sent.info)


def test_after_a_damaged_delta_only_a_full_update_is_taken() -> None:
    named = bits([(torch.float32, 60)], 0)
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
    named = bits([(torch.float32, 60)], 0)
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
    buckets, retained = version(bits([(torch.float32, 200)], 0), 3), RetainedBuckets()
    retained.put(buckets[0].data, buckets[0].info)
    with pytest.raises(WeightSyncError, match=r"0\.3"):
        retained.load("0.3", lambda _: None)
    with pytest.raises(WeightSyncError, match=r"bucket 2 of .*0\.3.* bucket 1 of .*0\.3"):
        retained.put(buckets[2].data, buckets[2].info)
    put(retained, buckets)
    loaded: list[torch.Tensor] = []
    retained.load("0.3", lambda pieces: loaded.extend(piece.data for piece in pieces))
    assert torch.equal(torch.cat(loaded).view(torch.int32), bits([(torch.float32, 200)], 0)[0][1].view(torch.int32))
