"""The exceptions that msgspec's decoders raise for bytes or text that somebody else has written."""

import msgspec

# MsgspecError alone is too narrow: bytes that are not UTF-8, and text with half a surrogate pair, raise a UnicodeError,
# and values nested too deeply a RecursionError. ``msgspec.convert``, of values that are decoded already, raises
# ValidationError alone. This is apart from ``errors``, which runs where msgspec is not installed.
UNDECODABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
