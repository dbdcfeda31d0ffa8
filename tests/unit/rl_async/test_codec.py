"""Structs with arrays to one frame and back."""

import msgspec
import numpy as np
import pytest

from rl_async import messages
from rl_async.errors import ProtocolError


class Sample(msgspec.Struct):
    name: str
    first: np.ndarray
    second: np.ndarray | None = None


decode = messages.decoder(Sample)


@pytest.mark.parametrize("name", ["bool", "uint8", "uint16", "int32", "int64", "float32", "float64"])
@pytest.mark.parametrize("shape", [(7,), (0,), (), (2, 3), (2, 0, 3)])
def test_arrays_come_back_as_they_were_and_read_only(name: str, shape: tuple[int, ...]) -> None:
    first = np.random.default_rng(0).integers(0, 2, shape).astype(name)
    back = decode(messages.encode(Sample("a", first, second=np.array([np.nan, -0.0, np.inf], np.float32))))
    assert (back.name, back.first.dtype, back.first.shape) == ("a", first.dtype, shape)
    assert np.array_equal(back.first, first)
    assert back.second is not None and back.second.tobytes() == np.array([np.nan, -0.0, np.inf], np.float32).tobytes()
    with pytest.raises(ValueError, match="read-only"):
        back.first.fill(0)


def test_decoded_arrays_are_views_of_the_frame() -> None:
    frame = bytearray(messages.encode(Sample("a", np.full(64, 7, np.uint8))))
    back = decode(memoryview(frame))
    frame[:] = frame.replace(b"\7" * 64, b"\1" * 64)
    assert back.first.sum() == 64


def test_an_array_with_gaps_is_sent_without_them() -> None:
    grid = np.arange(12, dtype=np.int32).reshape(3, 4)
    back = decode(messages.encode(Sample("a", grid[:, ::2], grid.T)))
    assert np.array_equal(back.first, grid[:, ::2]) and np.array_equal(back.second, grid.T)


def test_an_array_of_another_type_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="float16"):
        messages.encode(Sample("a", np.zeros(2, np.float16)))
    with pytest.raises(ProtocolError, match=">i4"):
        messages.encode(Sample("a", np.zeros(2, ">i4")))


EXT = msgspec.msgpack.Ext


@pytest.mark.parametrize(
    "array",
    [
        None,
        [],
        [[2]],
        [[2], b"12345678"],
        [[3], [1, 2]],
        [[3], ["x", b"abc"]],
        [[2], EXT(3, b"1234567")],
        [[3], EXT(3, b"12345678")],
        [[-2, -1], EXT(3, b"12345678")],
        [["2"], EXT(3, b"12345678")],
        [[2.0], EXT(3, b"12345678")],
        [[1 << 63, 0], EXT(3, b"")],
        [[2], EXT(99, b"12345678")],
        [[2], EXT(-1, b"12345678")],
    ],
)
def test_a_malformed_array_is_a_protocol_error(array: object) -> None:
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode({"name": "a", "first": array}))


def test_every_shorter_frame_is_a_protocol_error() -> None:
    frame = messages.encode(Sample("a", np.arange(3, dtype=np.int32)))
    for end in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode(frame[:end])
