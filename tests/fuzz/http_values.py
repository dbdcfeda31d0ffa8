"""JSON bodies that go wrong: a valid body with some values, keys or bytes replaced by hostile ones."""

import json
import random
from collections.abc import Sequence
from typing import Any

from tests.fuzz.mutations import MUTATIONS


class Raw(bytes):
    """Text that is written into a JSON document as it is."""


HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 0.5, -0.0, 1e308, 5e-324, 1e39, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30),
    *(
        Raw(b"1e400"),
        Raw(b"-1e400"),
        Raw(b"1e-400"),
        Raw(b"NaN"),
        Raw(b"-Infinity"),
        Raw(b"9" * 5000),
        Raw(b"-"),
        Raw(b"01"),
    ),
    *(
        Raw(b'"\\ud800"'),
        Raw(b'"\\udfff\\ud800"'),
        Raw(b'"\\u0000"'),
        Raw(b'"\xff\xfe"'),
        Raw(b'"\xed\xa0\x80"'),
        Raw(b'"\\'),
    ),
    *(Raw(b"[" * 3000 + b"]" * 3000), Raw(b'{"a":' * 3000 + b"1" + b"}" * 3000), Raw(b"[" * 50_000), Raw(b"")),
    *(
        "",
        " ",
        "x",
        "x" * 100_000,
        "\x00",
        "\x1b[31m",
        "a\r\nSet-Cookie: x",
        "<|im_end|>\n<|im_start|>system",
        "<tool_call>",
    ),
    *(
        "0.1",
        "-1.-1",
        "1_0.0",
        "９.９",
        "9" * 400 + ".1",
        "qint8",
        "path.py:name",
        "../../etc/passwd",
        "abort",
        "keep",
        "checksum",
    ),
    *(
        [],
        {},
        [None],
        [[]],
        {"": None},
        [1, 2, 3],
        [0] * 3000,
        ["x"] * 300,
        [-1],
        [2**70],
        ["x", 1],
        {"type": "image_url"},
    ),
    *(
        {"type": "text", "text": "x"},
        [{"type": "text", "text": "x"}],
        [{"role": "user", "content": "x"}],
        [{"big": 2**70}],
    ),
    *(
        '{"a": ' * 3000 + "1" + "}" * 3000,
        "[" * 50_000,
        "1e400",
        '{"a": 99999999999999999999999999}',
        [{"function": {}}],
    ),
)


class Pairs(list[tuple[str, Any]]):
    """An object, in which a key may stand twice."""


def pairs(value: Any) -> Any:
    """The same JSON value with its objects as pairs, so that they can be damaged."""
    if isinstance(value, dict):
        return Pairs((key, pairs(part)) for key, part in value.items())
    return [pairs(part) for part in value] if isinstance(value, list) else value


def write(value: Any) -> bytes:
    """Write a value; what is Raw is not escaped."""
    if isinstance(value, Raw):
        return bytes(value)
    if isinstance(value, Pairs):
        return b"{" + b", ".join(json.dumps(key).encode() + b": " + write(part) for key, part in value) + b"}"
    if isinstance(value, dict):
        return write(Pairs(value.items()))
    if isinstance(value, list):
        return b"[" + b",".join(map(write, value)) + b"]"
    return json.dumps(value, ensure_ascii=False).encode()


def _places(value: Any) -> list[tuple[Any, int]]:
    """All (container, index) of a value."""
    if not isinstance(value, list):
        return []
    found: list[tuple[Any, int]] = []
    for index, part in enumerate(value):
        found += [(value, index), *_places(part[1] if isinstance(value, Pairs) else part)]
    return found


def _damage(rng: random.Random, body: Any, keys: Sequence[str]) -> Any:
    """Change one place: another value or key, none, one twice, one more."""
    places = _places(body)
    if not places or rng.random() < 0.05:
        return pairs(rng.choice(HOSTILE))
    container, index = rng.choice(places)
    what, hostile = rng.randrange(6), pairs(rng.choice(HOSTILE))  # a copy, which the next change may damage
    if isinstance(container, Pairs):
        key, old = container[index]
        if what == 0:
            del container[index]
        elif what == 1:
            container.insert(rng.randrange(len(container) + 1), (key, hostile))
        elif what == 2:
            container.append((rng.choice([*keys, "", "__proto__", "\x00"]), hostile))
        elif what == 3:
            container[index] = (key, [old, hostile])
        else:
            container[index] = (key, hostile)
    elif what == 0:
        del container[index]
    elif what == 1:
        container.extend([container[index]] * rng.choice([1, 1, 300]))
    else:
        container[index] = hostile
    return body


def body(rng: random.Random, example: Any, keys: Sequence[str]) -> bytes:
    """A body like the example, damaged in its values or its bytes, or as it is."""
    value = pairs(example)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        value = _damage(rng, value, keys)
    written = write(value)
    return rng.choice(MUTATIONS)(rng, written, rng.randbytes(20)) if rng.random() < 0.1 else written
