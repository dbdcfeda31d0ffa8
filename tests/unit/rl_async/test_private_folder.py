"""A run's private folder: where it is, who can enter it, and when it goes."""

import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import BinaryIO

import pytest

from rl_async.errors import UserError
from rl_async.process.private_folder import (
    LOCK,
    LONGEST,
    hold_private_folder,
    make_private,
    private_folder,
    socket_file,
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def test_only_its_user_enters_a_run_s_folder_while_the_run_lasts(tmp_path: Path) -> None:
    folder = private_folder(tmp_path)
    with hold_private_folder(tmp_path):
        assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
        (folder / "queue").touch()
    assert not folder.exists()


def test_a_path_of_any_length_has_short_socket_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert len(str(private_folder(Path("/x" * 500)) / "shard-1000")) < 100  # a socket file's path ends at 107


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


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(UserError, match="TMPDIR"):
        make_private(tmp_path / "open")


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
