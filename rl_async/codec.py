"""Structs with arrays to one frame and back.

Inside the msgpack an array is an extension: its type stands for the dtype, its data are the bytes. An array that does
not have one dimension is ``[shape, extension]``. Decoded arrays are read-only views of the received frame.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

from rl_async.errors import ProtocolError
from rl_async.files import UNDECODABLE

T = TypeVar("T")
Frame = bytes | memoryview

_DTYPES = tuple(np.dtype(name) for name in ("bool", "uint8", "uint16", "int32", "int64", "float32", "float64"))
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


def _enc_hook(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"cannot encode {type(value).__name__}")
    code = _CODES.get(value.dtype)
    if code is None:
        raise ProtocolError(f"cannot encode an array of {value.dtype}; known: {', '.join(map(str, _DTYPES))}")
    extension = msgspec.msgpack.Ext(code, np.ascontiguousarray(value).data)
    return extension if value.ndim == 1 else (value.shape, extension)


def _dec_hook(wanted: type, value: Any) -> Any:
    if type(value) is np.ndarray and wanted is np.ndarray:
        return value
    if wanted is not np.ndarray:
        raise NotImplementedError(f"cannot decode {wanted}")
    try:
        shape, flat = value
        # An array of numbers instead of an extension.
        if type(flat) is not np.ndarray:
            raise ProtocolError("malformed array: its bytes are missing")
        if min(shape, default=0) < 0:
            raise ProtocolError(f"an array of {flat.size} {flat.dtype} is not of shape {list(shape)}")
        return flat.reshape(shape)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"malformed array: {error}") from error


def _ext_hook(code: int, data: memoryview) -> np.ndarray:
    if not 0 <= code < len(_DTYPES):
        raise ProtocolError(f"an array of unknown type {code}")
    try:
        return np.frombuffer(data, _DTYPES[code])
    except ValueError as error:
        raise ProtocolError(f"malformed array: {error}") from error


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)


def encode(message: msgspec.Struct) -> bytes:
    """Encode a struct whose arrays have a dtype listed in this module. Raises ProtocolError for another."""
    return _encoder.encode(message)


def decoder(kind: type[T]) -> Callable[[Frame], T]:
    """A function that decodes a ``kind`` that :func:`encode` encoded. Make it once: that takes longer than its use.

    It raises ProtocolError for bytes that are not a valid ``kind``.
    """
    decode = msgspec.msgpack.Decoder(kind, dec_hook=_dec_hook, ext_hook=_ext_hook).decode

    def checked(frame: Frame) -> T:
        try:
            return decode(frame)
        except (*UNDECODABLE, NotImplementedError) as error:
            raise ProtocolError(f"malformed {kind.__name__}: {error}") from error

    return checked
