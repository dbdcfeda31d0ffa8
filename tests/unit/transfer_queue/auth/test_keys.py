"""Key files: who may read them, what is refused, and who is on the list."""

import os
import stat
from pathlib import Path

import msgspec
import pytest
import zmq

from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.queue import QueueConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import UserError
from rl_async.transfer_queue.auth.keys import (
    AllowList,
    client_keys,
    make_keys,
    provide_keys,
    read_client_keys,
    server_keys,
)


def config(**queue: object) -> RunConfig:
    settings = msgspec.convert(queue, QueueConfig)
    return RunConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"), queue=settings)


def test_only_their_owner_can_read_keys(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    files = [path for path in (tmp_path / "keys").rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_keys_that_are_there_stay(tmp_path: Path) -> None:
    assert len(make_keys(tmp_path)) == 2
    before = read_client_keys(tmp_path)
    assert make_keys(tmp_path) == []
    assert make_keys(tmp_path, "guest") == [tmp_path / "guest.key"]
    assert read_client_keys(tmp_path) == before != read_client_keys(tmp_path, "guest")


def test_a_client_that_was_shut_out_is_not_let_in_by_the_next_keygen(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / "clients" / "run.pub").unlink()
    with pytest.raises(UserError, match="another name"):
        make_keys(tmp_path)


@pytest.mark.parametrize("name", ["", "../run", "server", "a/b", "a.b"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="--client"):
        make_keys(tmp_path, name)


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    make_keys(tmp_path)
    keys, secret = read_client_keys(tmp_path), (tmp_path / "server.key").read_text().strip()
    assert keys.secret.decode() not in repr(keys) and keys.public == zmq.curve_public(keys.secret)
    assert secret not in repr(server_keys(config(keys=str(tmp_path)), tmp_path))


def test_a_run_on_loopback_needs_no_keys(tmp_path: Path) -> None:
    provide_keys(config(), tmp_path)
    assert client_keys(config(), tmp_path) is server_keys(config(), tmp_path) is None
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("queue", [{"host": "0.0.0.0"}, {"host": "10.1.2.3"}, {"curve": "always"}])
def test_a_run_that_needs_keys_gets_its_own(tmp_path: Path, queue: dict[str, str]) -> None:
    with pytest.raises(UserError, match="keygen"):
        server_keys(config(**queue), tmp_path)
    provide_keys(config(**queue), tmp_path)
    keys = client_keys(config(**queue), tmp_path)
    assert keys is not None and keys == read_client_keys(tmp_path / "keys")
    server = server_keys(config(**queue), tmp_path)
    assert server is not None and keys.public in server.allowed.keys


def test_keys_that_a_config_names_are_not_made_up(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"server\.key.*keygen"):
        provide_keys(config(keys=str(tmp_path / "none")), tmp_path)
    make_keys(tmp_path / "some")
    (tmp_path / "some" / "run.key").unlink()
    with pytest.raises(UserError, match=r"run\.key"):
        provide_keys(config(keys=str(tmp_path / "some")), tmp_path)


def test_a_file_without_a_key_is_named(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / "clients" / "bad.pub").write_text("short")
    with pytest.raises(UserError, match=r"bad\.pub"):
        AllowList(tmp_path / "clients")
    (tmp_path / "run.key").write_text("\x7f" * 40)
    with pytest.raises(UserError, match=r"run\.key"):
        read_client_keys(tmp_path)


def test_the_list_follows_its_folder(tmp_path: Path) -> None:
    make_keys(tmp_path)
    allowed = AllowList(tmp_path / "clients", ["x" * 40])
    run = read_client_keys(tmp_path).public
    assert allowed.keys == {run, b"x" * 40}
    make_keys(tmp_path, "guest")
    (tmp_path / "clients" / "run.pub").unlink()
    allowed.refresh()
    assert allowed.keys == {read_client_keys(tmp_path, "guest").public, b"x" * 40}
    (tmp_path / "clients" / "guest.pub").unlink()
    (tmp_path / "clients").rmdir()
    allowed.refresh()
    assert allowed.keys == {b"x" * 40}


def test_a_file_that_is_just_being_copied_lets_nobody_in_and_ends_nothing(tmp_path: Path) -> None:
    make_keys(tmp_path)
    allowed = AllowList(tmp_path / "clients")
    run, file = read_client_keys(tmp_path).public, tmp_path / "clients" / "new.pub"
    file.write_text("")
    allowed.refresh()
    assert allowed.keys == {run}
    file.write_bytes(b"y" * 40)  # which does not change the folder's time stamp
    allowed.refresh()
    assert allowed.keys == {run, b"y" * 40}


def test_a_folder_that_was_away_counts_again_when_it_is_back(tmp_path: Path) -> None:
    make_keys(tmp_path)
    os.utime(tmp_path / "clients", (1, 1))  # long ago, so that the time stamp alone says that nothing changed
    allowed = AllowList(tmp_path / "clients")
    keys = allowed.keys
    (tmp_path / "clients").rename(tmp_path / "away")
    allowed.refresh()
    assert not allowed.keys
    (tmp_path / "away").rename(tmp_path / "clients")
    allowed.refresh()
    assert allowed.keys == keys != set()
