"""Files of lines survive a crash in the middle of one."""

from pathlib import Path

import pytest

from rl_async.files import append_lines, drop_torn_line


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
