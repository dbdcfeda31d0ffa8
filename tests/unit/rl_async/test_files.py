"""Files are replaced whole, and files of lines survive a crash in the middle of one."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl_async.files import (
    append_durably,
    append_lines,
    drop_torn_line,
    make_durable_folder,
    replace_file,
    written_whole,
)


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
