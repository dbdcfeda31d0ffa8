"""Files are replaced whole, files of lines survive a crash, and every error of a decoder is caught."""

import ast
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from rl_async.files import (
    UNDECODABLE,
    append_durably,
    append_lines,
    drop_torn_line,
    make_durable_folder,
    replace_file,
    written_whole,
)
from tests.unit.test_imports import FILES


@pytest.mark.parametrize("torn", [b"", b'{"st', b"x" * 200_000])
@pytest.mark.parametrize("whole", [b"", b"one\n", b"one\n" + b"y" * 150_000 + b"\n"])
def test_what_is_left_of_a_line_is_cut_off(tmp_path: Path, whole: bytes, torn: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(whole + torn)
    with append_lines(path) as file:
        file.write(b"two\n")
    assert path.read_bytes() == whole + b"two\n"


def test_a_new_file_is_begun(tmp_path: Path) -> None:
    drop_torn_line(tmp_path / "new.jsonl")
    assert not (tmp_path / "new.jsonl").exists()
    append_lines(tmp_path / "new.jsonl").close()
    assert (tmp_path / "new.jsonl").read_bytes() == b""


@pytest.mark.parametrize("after", [b"", b"\n", b"\nlater\n", b"x" * 100_000 + b"\n"])
def test_lines_are_cut_off_where_a_power_cut_left_zeros(tmp_path: Path, after: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"y" * 80_000 + b"\nhalf" + bytes(70_000) + after)
    append_lines(path).close()
    assert path.read_bytes() == b"y" * 80_000 + b"\n"


def test_a_folder_is_made_with_its_parents_or_kept(tmp_path: Path) -> None:
    for _ in range(2):
        make_durable_folder(tmp_path / "a" / "b", 0o700)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_durable_folder(tmp_path / "file" / "b")


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    for content in (b"old", b"new"):
        replace_file(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    with written_whole(tmp_path / "out") as unfinished:
        unfinished.mkdir()
        (unfinished / "new").touch()
        assert not (tmp_path / "out").exists()
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["new"]


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    replace_file(tmp_path / "file", b"old")
    with pytest.raises(KeyError), written_whole(tmp_path / "file") as unfinished:
        unfinished.write_bytes(b"ne")
        raise KeyError
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == b"old"


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let this process write no file beyond ``size`` bytes: what does not fit is left out, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("torn", [b"", b'{"st'])
def test_lines_are_appended_all_or_none_although_others_append_to_the_file(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"one\n" + torn)
    with files_of_at_most(10), pytest.raises(OSError):
        append_durably(path, b"two\nthree\n", 0)
    append_durably(path, b"four\n", 0)  # of another process, when there is room again
    assert path.read_bytes() == b"one\nfour\n"


WRITES = """
import os, sys
from pathlib import Path
from rl_async.files import written_whole
os.getpid = lambda: 1
with written_whole(Path(sys.argv[1])) as folder:
    folder.mkdir()
    (folder / "weights").write_text(sys.argv[2])
    print("begun", flush=True)
    sys.stdin.readline()
    (folder / "tokenizer").write_text(sys.argv[2])
"""


def test_two_processes_with_one_id_do_not_share_what_they_write(tmp_path: Path) -> None:
    """Containers with one file system have the same process ids."""
    target = tmp_path / "model"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WRITES, str(target), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in ("first", "second")
    ]
    for process in running:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
    codes = [process.wait(60) for process in running if process.communicate("\n", 60)]
    assert codes[0] == 0
    assert {file.name: file.read_text() for file in target.iterdir()} == {"weights": "first", "tokenizer": "first"}
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_killed_process_left_is_deleted_after_a_day(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (".file.1-0123abcd", ".file.2-0123abcd", ".file.mine-1"))
    for path in (old, new, other):
        path.write_text("half")
    for path in (old, other):
        os.utime(path, (1, 1))
    replace_file(tmp_path / "file", b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".file.2-0123abcd", ".file.mine-1", "file"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full: run it on Linux")
def test_a_write_to_a_full_disk_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError) as failed, written_whole(tmp_path / "file"):
        Path("/dev/full").write_bytes(b"x")
    assert failed.value.filename == str(tmp_path / "file")


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
        if node.value is not None and any(makes_decoder(inner) for inner in ast.walk(node.value))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }


def makes_decoder(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Decoder")


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
    # Other files neither decode nor guard a decode.
    concerned = re.compile("decode|msgspec|UNDECODABLE|DAMAGE")
    trees = {path: ast.parse(text) for path in FILES if concerned.search(text := path.read_text())}
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
