"""Files are replaced whole, files of lines survive a crash, and every error of a decoder is caught."""

import ast
import fcntl
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pytest

from rl_async.configs.checks import check
from rl_async.configs.load import load_config
from rl_async.errors import ConfigError, UserError
from rl_async.extraction import Found, behind_reasoning, boxed, extract, trace
from rl_async.files import (
    UNDECODABLE,
    append_durably,
    append_lines,
    drop_torn_line,
    make_durable_folder,
    nearest_run,
    replace_file,
    written_whole,
)
from rl_async.model_files import INDEX, indexed_files, read_header, weight_files
from rl_async.process import run_files
from rl_async.process.private_folder import (
    LOCK,
    LONGEST,
    hold_private_folder,
    make_private,
    private_folder,
    socket_file,
)
from rl_async.process.role import main_thread
from rl_async.process.run_files import (
    TIMELINE_FOLDER,
    Beat,
    ProgressWriter,
    TimelineReader,
    beat,
    enter,
    missing_ranks,
    read_beats,
    read_progress,
    read_timeline,
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
    called = node.func if isinstance(node, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return name.endswith("Decoder")


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


# Damaged and hostile files of weights, and indexes that name files elsewhere.


HEADER = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}}


def stored(header: bytes, data: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def test_a_header_tells_the_tensors(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(stored(json.dumps(HEADER).encode()))
    (tensor,) = read_header(tmp_path / "m.safetensors").values()
    assert (tensor.dtype, tensor.shape) == ("F32", [2])


def entries(*tensors: tuple[str, list[int], tuple[int, int]]) -> bytes:
    """A header of tensors of these types, shapes and places."""
    return json.dumps(
        {str(n): dict(zip(("dtype", "shape", "data_offsets"), each, strict=True)) for n, each in enumerate(tensors)}
    ).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\0",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
        stored(json.dumps(HEADER).encode(), length=2**63),
        stored(json.dumps(HEADER).encode(), length=1 << 40),
        stored(json.dumps(HEADER).encode(), length=3),
        stored(json.dumps(HEADER).encode(), data=b"\0" * 7),
        stored(b"[]"),
        stored(b"{" * 100_000),
        stored(b'{"a": ' * 100_000),
        stored(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}'),
        stored(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}'),
        stored(b'{"a": {"dtype": 1}}'),
        stored(b"\xff\xfe"),
        stored(json.dumps(HEADER).encode(), data=b"\0" * 64),
        stored(entries(("F32", [2], (0, 8)), ("F32", [2], (0, 8)))),
        stored(entries(("F32", [2], (0, 8)), ("F32", [2], (4, 12))), data=b"\0" * 12),
        stored(entries(("F32", [2], (8, 16))), data=b"\0" * 16),
        stored(entries(("F32", [3], (0, 8)))),
        stored(entries(("F32", [-1, -2], (0, 8)))),
        stored(entries(("F32", [1 << 62, 8], (0, 8)))),
        stored(entries(("F33", [2], (0, 8)))),
        stored(b'{"a": {"dtype": "F32", "dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}'),
        stored(b'{"__metadata__": {"format": 1}}', data=b""),
    ],
)
def test_what_is_no_file_of_weights_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"m\.safetensors"):
        read_header(tmp_path / "m.safetensors")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x", "", "..", "a/b.safetensors"])
def test_an_index_that_names_something_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"weight_map": {"a": "m-1.safetensors", "b": name}}))
    with pytest.raises(ValueError, match=r"index\.json"):
        indexed_files(index)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_what_is_no_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json"):
        indexed_files(tmp_path / "index.json")


def test_an_index_names_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {"a": "2.st", "b": "1.st", "c": "2.st"}}))
    assert indexed_files(tmp_path / "index.json") == ["1.st", "2.st"]


def test_weights_that_a_folder_has_twice_are_those_of_the_index(tmp_path: Path) -> None:
    """As Mistral's folders have them, under other names in a file of their own."""
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}')
    for name in ("model-1", "model-2", "consolidated"):
        (tmp_path / f"{name}.safetensors").touch()
    assert {file.name for file in weight_files(tmp_path)} == {"model-1.safetensors", "model-2.safetensors"}


# Answers are found where people write them, and a chain says which step found what.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 + 4 = 7", "7"),
        ("The answer is 7.", "7"),
        ("it costs $1,234.50, sir", "1234.5"),
        ("12,34", "34"),
        ("x = -3", "-3"),
        ("-3", "-3"),
        ("10-3", "3"),
        ("(2)-5", "5"),
        ("72.00", "72"),
        ("007", "7"),
        ("0.5", "0.5"),
        ("1000000000000000000000000000001", "1000000000000000000000000000001"),
        ("100", "100"),
        ("it is .5", "0.5"),
        ("-.50", "-0.5"),
        ("see sec.5", "5"),
        ("x = \u22125", "-5"),
        ("10\u22123", "3"),
        ("1.5e-3", "0.0015"),
        ("1.5E+3", "1500"),
        ("1e999999999", "999999999"),
        ("-0.0", "0"),
        ("1/2", "2"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_is_found_and_written_plainly(text: str, expected: str | None) -> None:
    assert extract(text, ("last_number",)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {x}", "x"),
        (r"\boxed{1} then \fbox{2}", "2"),
        (r"\boxed{1} and \boxed{2", "1"),
        ("boxed{3}", None),
        (r"\boxed{\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{a \boxed{b}}", "b"),
        (r"} \boxed{1} }", "1"),
        (r"so \boxed 34.", "34"),
        (r"$\fbox -3$", "-3"),
        (r"\boxed{1} or \boxed 2", "1"),
    ],
)
def test_the_last_closed_box_is_found(text: str, expected: str | None) -> None:
    assert extract(text, ("boxed",)) == expected


def test_boxes_that_are_never_closed_are_read_once() -> None:
    read: list[str] = []

    class Noting(str):
        def __getitem__(self, place: Any) -> str:
            read.append("")
            return super().__getitem__(place)

    assert boxed(Noting("\\boxed{" * 2800)) is None
    assert len(read) < 10_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>a</answer> no, <ANSWER>\n b \n</ANSWER>", "b"),
        ("<answer>1<answer>2</answer>", "2"),
        ("<answer>1", None),
    ],
)
def test_the_last_pair_of_tags_is_found(text: str, expected: str | None) -> None:
    assert extract(text, ("answer_tag",)) == expected


def test_a_pattern_gives_its_group_of_the_last_match() -> None:
    assert extract("A: 1\nA: 2\n", (r"regex:^A: (\d)$",)) == "2"
    assert extract("yes or no", ("regex:yes|no",)) == "no"
    assert extract("left", (r"regex:(right)|(left)",)) == "left"
    assert extract("nothing", ("regex:x(y)",)) is None


def test_a_chain_narrows_down_and_a_list_takes_the_first_that_finds_something() -> None:
    chain = (("boxed", "answer_tag"), "last_number")
    assert extract(r"5 steps: \boxed{x = 12} <answer>3</answer>", chain) == "12"
    assert trace("<answer>3 apples</answer>, 4", chain) == [Found("answer_tag", "3 apples"), Found("last_number", "3")]
    assert trace("just 4", chain) == [Found("boxed or answer_tag", None)]
    assert extract("all of it", ()) == "all of it"


@pytest.mark.parametrize(
    ("extract", "named"),
    [("[last_numbr]", "last_number"), ("['regex:(']", "regular expression"), ("[[boxd]]", "boxed")],
)
def test_a_mistake_in_the_config_is_named(extract: str, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.functions: .*{named}"):
        check(load_config("sort", [f"reward.functions=[{{name: exact_answer, extract: {extract}}}]"]))


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("7", "", "7"),
        ("<think>a</think>7", "a", "7"),
        ("a\n</think>\n\n7", "a", "7"),
        ("<think>a</think>b<think>c</think>7", "a</think>b<think>c", "7"),
        ("<think> maybe 7", "<think> maybe 7", ""),
        ("<think>a</think> so <think> 7", "<think>a</think> so <think> 7", ""),
        ("<seed:think>maybe 7", "<seed:think>maybe 7", ""),
        ("maybe 6</seed:think>7", "maybe 6", "7"),
        ("[THINK]maybe 6[/THINK]7", "maybe 6", "7"),
        ("◁think▷maybe 7", "◁think▷maybe 7", ""),
        ("Here is my thought process: 6. Here is my response: 7", "6.", "7"),
        ("Here are my reasoning steps: \\boxed{7}", "Here are my reasoning steps: \\boxed{7}", ""),
        ("<thought>6</thought>7", "6", "7"),
        ("7 as in `<thinking>`", "", "7 as in `<thinking>`"),
    ],
)
def test_the_answer_stands_behind_the_reasoning(text: str, reasoning: str, answer: str) -> None:
    assert behind_reasoning(text) == (reasoning, answer)


# Files in which a run's processes say what they do: the timeline, and heartbeats of ranks.


def test_what_was_entered_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    assert read_timeline(tmp_path) == []
    enter(tmp_path, "launcher", "engine-0", "running", about="pid 7")
    beat(tmp_path, 0, 3, "training")
    enter(tmp_path, "weights", "engine-0", "", version="0.4")
    found = read_timeline(tmp_path)
    assert [(one.writer, one.lane, one.stage, one.step, one.version, one.about) for one in found] == [
        ("launcher", "engine-0", "running", -1, "", "pid 7"),
        ("trainer-0", "trainer-0", "training", 3, "", ""),
        ("weights", "engine-0", "", -1, "0.4", ""),
    ]
    assert [one.at for one in found] == sorted(one.at for one in found)


def test_a_torn_line_is_lost_alone(tmp_path: Path) -> None:
    enter(tmp_path, "weights", "engine-0", "probe")
    file = tmp_path / TIMELINE_FOLDER / "weights.jsonl"
    file.write_bytes(file.read_bytes() + b'{"lane":"engine-0","at":1795')
    enter(tmp_path, "weights", "engine-0", "pause")
    assert [one.stage for one in read_timeline(tmp_path)] == ["probe", "pause"]


def test_its_size_is_bounded_and_the_newest_lines_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "MOST_BYTES", 2000)
    reader = TimelineReader(tmp_path)
    for step in range(200):
        enter(tmp_path, "trainer-0", "trainer-0", "training", step=step)
        if step % 7 == 0:
            assert reader.read() == read_timeline(tmp_path), "what follows the files agrees with what reads them anew"
    assert sum(file.stat().st_size for file in (tmp_path / TIMELINE_FOLDER).iterdir()) < 4400
    steps = [one.step for one in read_timeline(tmp_path)]
    assert len(steps) >= 20 and steps == list(range(200 - len(steps), 200))


def at(rank: int, step: int, phase: str) -> Beat:
    return Beat(rank=rank, pid=100 + rank, step=step, phase=phase, since=0.0)


def test_the_last_beat_of_each_rank_is_read(tmp_path: Path) -> None:
    assert read_beats(tmp_path) == []
    beat(tmp_path, 1, 4, "training")
    beat(tmp_path, 0, 4, "training")
    beat(tmp_path, 0, 5, "waiting for a batch")
    said = read_beats(tmp_path)
    assert [(b.rank, b.step, b.phase, b.pid) for b in said] == [
        (0, 5, "waiting for a batch", os.getpid()),
        (1, 4, "training", os.getpid()),
    ]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"rank": 0}', b"\xff", b"[" * 5000])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "0.json").write_bytes(content)
    with pytest.raises(UserError, match=r"0\.json"):
        read_beats(tmp_path)


def test_progress_is_written_now_and_then_and_tells_what_the_rest_takes(tmp_path: Path) -> None:
    now, read = 100.0, lambda: read_progress(tmp_path, "trainer-0")
    write = ProgressWriter(tmp_path, "trainer-0", lambda: now)
    assert read() is None
    for seconds, done, seen in ((0.0, 0, 0), (0.5, 1, 0), (2.0, 4, 4), (2.5, 5, 4)):
        now = 100.0 + seconds
        write("training", done, 12, "micro-batches")
        found = read()
        assert found is not None and (found.done, found.total, found.since) == (seen, 12, 100.0)
    assert found.left_s == 4.0
    # New work is written at once, and its time counts from there.
    write("values", 0, 3, "micro-batches")
    found = read()
    assert found is not None and (found.work, found.since, found.left_s) == ("values", 102.5, None)


def test_who_cannot_run_is_missing_before_who_is_behind_and_else_all_others_are() -> None:
    beats = [at(0, 3, "meeting the ranks"), at(1, 3, "training"), at(2, 3, "meeting the ranks")]
    fine = {0: "S", 1: "R", 2: "S"}
    assert missing_ranks(beats, 0, fine) == [beats[1]]
    assert missing_ranks(beats, 0, fine | {2: "T"}) == [beats[2]]
    assert missing_ranks(beats, 1, fine) == [beats[0], beats[2]]


def test_the_newest_dump_counts() -> None:
    dump = 'Stack (most recent call first):\n  File "a.py", line 1 in old\n'
    assert [frame.name for frame in main_thread(dump + dump.replace("old", "new"))] == ["new"]
    assert main_thread("") == ()


# A run's private folder: where it is, who can enter it, and when it goes.


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.mark.usefixtures("elsewhere")
def test_only_its_user_enters_a_run_s_folder_while_the_run_lasts(tmp_path: Path) -> None:
    folder = private_folder(tmp_path)
    with hold_private_folder(tmp_path):
        assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
        (folder / "queue").touch()
    assert not folder.exists()


@pytest.mark.usefixtures("elsewhere")
def test_a_path_of_any_length_has_short_socket_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert len(str(private_folder(Path("/x" * 500)) / "shard-1000")) < 100  # a socket file's path ends at 107


@pytest.mark.usefixtures("elsewhere")
def test_a_temporary_folder_with_a_long_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "d" * 150)
    with pytest.raises(UserError, match="TMPDIR"):
        socket_file(tmp_path, "queue")
    room = LONGEST - len(str(private_folder(tmp_path).relative_to(tempfile.gettempdir()) / "queue")) - 1
    monkeypatch.setattr(tempfile, "tempdir", "/" + "d" * (room - 1))
    with socket.socket(socket.AF_UNIX) as found, pytest.raises(FileNotFoundError):
        found.connect(str(socket_file(tmp_path, "queue")))
    monkeypatch.setattr(tempfile, "tempdir", "/" + "d" * room)
    with pytest.raises(UserError, match="TMPDIR"):
        socket_file(tmp_path, "queue")


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(UserError, match="TMPDIR"):
        make_private(tmp_path / "open")


@pytest.mark.usefixtures("elsewhere")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """Although no third user could enter it, and this one, root, could."""
    folder = Path("/root")
    if os.getuid() == 0:
        (folder := tmp_path / "theirs").mkdir(mode=0o700)
        os.chown(folder, 1, -1)
    elif folder.stat().st_mode & 0o077:
        pytest.skip("chmod 700 /root makes a folder of another user that only he can enter")
    with pytest.raises(UserError, match="TMPDIR"):
        make_private(folder)


@pytest.mark.usefixtures("elsewhere")
def test_what_a_killed_launcher_left_goes_when_the_next_one_starts_and_nothing_else(tmp_path: Path) -> None:
    dead, by_hand = private_folder(tmp_path / "dead"), private_folder(tmp_path / "by-hand")
    with hold_private_folder(tmp_path / "living"):
        for folder in (dead, by_hand):
            make_private(folder)
            (folder / "queue").touch()
        (dead / LOCK).touch()  # which the kernel released
        with hold_private_folder(tmp_path / "next"):
            assert not dead.exists()
            assert (by_hand / "queue").exists(), "a queue that was started by hand has no launcher"
            assert private_folder(tmp_path / "living").exists()


@pytest.mark.usefixtures("elsewhere")
def test_a_lock_whose_folder_was_removed_before_it_was_held_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, flock, locked = private_folder(tmp_path), fcntl.flock, []

    def late(file: BinaryIO, operation: int) -> None:
        if not locked:
            shutil.rmtree(folder)
        locked.append(operation)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with hold_private_folder(tmp_path):
        assert (folder / LOCK).exists() and len(locked) == 2


@pytest.mark.usefixtures("elsewhere")
def test_a_run_that_goes_on_after_a_kill_finds_nothing_of_before(tmp_path: Path) -> None:
    folder = private_folder(tmp_path)
    make_private(folder.parent)
    make_private(folder)
    for left in (LOCK, "queue"):
        (folder / left).touch()
    with hold_private_folder(tmp_path):
        assert [file.name for file in folder.iterdir()] == [LOCK]
        with (folder / LOCK).open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_missing_run_is_named_by_the_nearest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    assert nearest_run(Path("runs/mien")) == nearest_run(Path("mine")) == "did you mean runs/mine?"
    assert nearest_run(Path("runs/zzz")) == nearest_run(Path("elsewhere/mine")) == ""
