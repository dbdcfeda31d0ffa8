"""Where bytes or text are decoded, every exception is caught that a decoder raises for what it does not understand."""

import ast
from collections.abc import Callable, Iterator

import msgspec
import pytest

from rl_async.files import UNDECODABLE
from tests.unit.test_imports import FILES

WHOLE = {"UNDECODABLE", "DAMAGE"}
NARROW = {"msgspec.DecodeError", "msgspec.MsgspecError"}
# An exception that a decoder raises, or a base of one. Others that stand around a decode have other reasons.
PARTS = NARROW | {"msgspec.ValidationError", "ValueError", "UnicodeError", "UnicodeDecodeError", "RecursionError"}


def decoders(tree: ast.Module) -> set[str]:
    """The names that a module gives to Decoder objects."""
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None]
    return {
        ast.unparse(target)
        for node in made
        if node.value is not None and "Decoder(" in ast.unparse(node.value)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }


def is_decode(node: ast.AST, named: set[str]) -> bool:
    """Whether ``node`` is a decode function of msgspec, called or handed on, or a method of a decoder."""
    if not isinstance(node, ast.Attribute) or not node.attr.startswith("decode"):
        return False
    owner = ast.unparse(node.value)
    return owner.startswith("msgspec.") or owner in named


def caught(node: ast.expr) -> set[str]:
    """The names of the exceptions in the type of an ``except`` clause."""
    if isinstance(node, ast.Tuple):
        return {ast.unparse(item.value if isinstance(item, ast.Starred) else item) for item in node.elts}
    return {ast.unparse(node)}


def guards(tree: ast.Module) -> Iterator[tuple[int, list[ast.stmt], set[str]]]:
    """The line, body and exceptions of each ``try`` and each ``with suppress``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            kinds = [caught(handler.type) for handler in node.handlers if handler.type is not None]
            yield node.lineno, node.body, set().union(*kinds)
        elif isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            listed = [call.args for call in calls if ast.unparse(call.func).endswith("suppress")]
            yield node.lineno, node.body, caught(ast.Tuple([name for names in listed for name in names]))


def too_narrow(tree: ast.Module) -> list[int]:
    """The lines of guards that catch some of what decoding raises but not all."""
    named = decoders(tree)
    return [
        line
        for line, body, kinds in guards(tree)
        if kinds & NARROW
        or (
            kinds & PARTS
            and not kinds & WHOLE
            and any(is_decode(inner, named) for statement in body for inner in ast.walk(statement))
        )
    ]


def test_no_decode_is_guarded_against_some_of_its_errors_alone() -> None:
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    assert [f"{path}:{line}" for path, tree in trees.items() for line in too_narrow(tree)] == []
    kinds = [kinds for tree in trees.values() for _, _, kinds in guards(tree)]
    assert sum(bool(found & WHOLE) for found in kinds) > 40


@pytest.mark.parametrize(
    ("code", "narrow"),
    [
        ("try: msgspec.json.decode(x)\nexcept msgspec.DecodeError: pass", True),
        ("try: helper(x)\nexcept (OSError, msgspec.MsgspecError): pass", True),
        ("try: msgspec.json.decode(x)\nexcept ValueError: pass", True),
        ("try: y = await off_loop(9, msgspec.json.decode, x)\nexcept msgspec.ValidationError: pass", True),
        ("d = msgspec.json.Decoder(int)\ntry: d.decode(x)\nexcept ValueError: pass", True),
        ("with suppress(msgspec.MsgspecError): msgspec.json.decode(x)", True),
        ("try: msgspec.json.decode(x)\nexcept (OSError, *UNDECODABLE): pass", False),
        ("try: msgspec.json.decode(x)\nexcept RecursionError: pass\nexcept UNDECODABLE: pass", False),
        ("try: msgspec.json.decode(x)\nexcept FileNotFoundError: pass", False),
        ("with suppress(*UNDECODABLE): msgspec.json.decode(x)", False),
        ("try: msgspec.convert(x, int)\nexcept msgspec.ValidationError: pass", False),
        ("try: x.decode()\nexcept UnicodeDecodeError: pass", False),
    ],
)
def test_narrow_guards_are_noticed(code: str, narrow: bool) -> None:
    assert bool(too_narrow(ast.parse(code))) == narrow


@pytest.mark.parametrize(
    ("decode", "kind"),
    [
        (lambda: msgspec.json.decode(b'"\xff"'), UnicodeDecodeError),
        (lambda: msgspec.json.decode('"\ud800"'), UnicodeEncodeError),
        (lambda: msgspec.json.decode(b"[" * 100_000), RecursionError),
        (lambda: msgspec.json.decode(b"["), msgspec.DecodeError),
        (lambda: msgspec.msgpack.decode(b"\xa1\xff"), UnicodeDecodeError),
        (lambda: msgspec.msgpack.decode(b"\x91" * 100_000), RecursionError),
        (lambda: msgspec.msgpack.decode(b"\xc1"), msgspec.DecodeError),
        (lambda: msgspec.toml.decode(b'a = "\xff"'), UnicodeDecodeError),
        (lambda: msgspec.yaml.decode("a: \ud800"), UnicodeEncodeError),
    ],
)
def test_what_the_decoders_raise_is_covered(decode: Callable[[], object], kind: type[Exception]) -> None:
    with pytest.raises(UNDECODABLE) as raised:
        decode()
    assert raised.type is kind
