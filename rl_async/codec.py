"""Structs to frames and back: one msgpack frame, then one raw frame per array, without copies.

An array inside a struct is replaced in the msgpack frame by ``[dtype, shape, frame]``; its bytes travel untouched.
Decoded arrays are read-only views of the received frames.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from rl_async.errors import ProtocolError

T = TypeVar("T")
Frame = bytes | memoryview

_DTYPES = {name: np.dtype(name) for name in ("bool", "uint8", "uint16", "int32", "int64", "float32", "float64")}


def encode(message: msgspec.Struct) -> list[Frame]:
    """Encode a struct to ``[msgpack, array0, array1, ...]``.

    Arrays must have a dtype listed in this module; non-contiguous arrays are copied once, others never.
    """
    arrays: list[Frame] = []

    def hook(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(f"cannot encode {type(value).__name__}")
        if value.dtype.name not in _DTYPES:
            raise ProtocolError(f"cannot encode an array of {value.dtype}; known: {', '.join(_DTYPES)}")
        flat = np.ascontiguousarray(value)
        arrays.append(flat.reshape(-1).view(np.uint8).data if flat.size else b"")
        return [value.dtype.name, value.shape, len(arrays)]

    head = msgspec.msgpack.encode(message, enc_hook=hook)
    return [head, *arrays]


def decode(frames: Sequence[Any], kind: type[T]) -> T:
    """Decode frames made by :func:`encode` into ``kind``.

    Raises ProtocolError if the bytes do not form a valid ``kind`` or an array's frame has the wrong length.
    """
    if not frames:
        raise ProtocolError(f"no frames for a {getattr(kind, '__name__', kind)}")

    def hook(wanted: type, value: Any) -> Any:
        if wanted is not np.ndarray:
            raise NotImplementedError(f"cannot decode {wanted}")
        return _array(frames, value)

    try:
        return msgspec.msgpack.decode(frames[0], type=kind, dec_hook=hook)
    except (msgspec.DecodeError, msgspec.ValidationError, NotImplementedError) as error:
        raise ProtocolError(f"malformed {getattr(kind, '__name__', kind)}: {error}") from error


def _array(frames: Sequence[Any], value: Any) -> np.ndarray:
    try:
        name, shape, index = value
        dtype, buffer = _DTYPES[name], frames[index]
        count = int(np.prod(shape, dtype=np.int64))
        if index < 1 or memoryview(buffer).nbytes != count * dtype.itemsize:
            raise ProtocolError(f"array frame {index} has {memoryview(buffer).nbytes} bytes, not {name}{list(shape)}")
        return np.frombuffer(buffer, dtype=dtype, count=count).reshape(shape)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"malformed array descriptor {value!r}") from error
