"""Key files: who may read them, what is refused, who is on the list, and who may be behind a socket file."""

import os
import stat
from pathlib import Path

import msgspec
import pytest
import zmq

from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import QueueConfig, RunConfig
from rl_async.errors import QueueLost, UserError
from rl_async.process.http_auth import ROLES
from rl_async.transfer_queue.auth import (
    AllowList,
    client_keys,
    make_client_keys,
    make_keys,
    provide_keys,
    read_client_keys,
    server_keys,
)
from rl_async.transfer_queue.client import Session


def config(**queue: object) -> RunConfig:
    settings = msgspec.convert(queue, QueueConfig)
    return RunConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"), queue=settings)


def test_only_their_owner_can_read_keys(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    files = [path for path in (tmp_path / "keys").rglob("*") if path.is_file()]
    assert len(files) == 2 * (1 + len(ROLES))
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_keys_that_are_there_stay(tmp_path: Path) -> None:
    assert make_keys(tmp_path) == [tmp_path / f"{name}.key" for name in ("server", *ROLES)]
    before = read_client_keys(tmp_path, "worker")
    assert make_keys(tmp_path) == []
    assert make_client_keys(tmp_path, "guest", "worker") == [tmp_path / "guest.key"]
    assert read_client_keys(tmp_path, "worker") == before != read_client_keys(tmp_path, "guest")


def test_a_client_that_was_shut_out_is_not_let_in_by_the_next_keygen(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / "clients" / "worker.pub").unlink()
    with pytest.raises(UserError, match="another name"):
        make_keys(tmp_path)


@pytest.mark.parametrize("name", ["", "../run", "server", "trainer", "a/b", "a.b"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="--client"):
        make_client_keys(tmp_path, name, "worker")


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    make_keys(tmp_path)
    keys, secret = read_client_keys(tmp_path, "worker"), (tmp_path / "server.key").read_text().strip()
    assert keys.secret.decode() not in repr(keys) and keys.public == zmq.curve_public(keys.secret)
    assert secret not in repr(server_keys(config(keys=str(tmp_path)), tmp_path))


@pytest.mark.parametrize("queue", [{}, {"host": "0.0.0.0"}, {"host": "10.1.2.3"}, {"curve": "always"}])
def test_every_run_gets_its_own_keys_one_for_each_role(tmp_path: Path, queue: dict[str, str]) -> None:
    with pytest.raises(UserError, match="keygen"):
        server_keys(config(**queue), tmp_path)
    provide_keys(config(**queue), tmp_path)
    allowed = server_keys(config(**queue), tmp_path).allowed
    assert allowed.roles == {client_keys(config(**queue), tmp_path, role).public: role for role in ROLES}
    assert len(allowed.roles) == len(ROLES)


def test_keys_that_a_config_names_are_not_made_up(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"server\.key.*keygen"):
        provide_keys(config(keys=str(tmp_path / "none")), tmp_path)
    make_keys(tmp_path / "some")
    (tmp_path / "some" / "reader.key").unlink()
    with pytest.raises(UserError, match=r"reader\.key"):
        provide_keys(config(keys=str(tmp_path / "some")), tmp_path)


def test_a_file_without_a_key_is_named(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / "clients" / "bad.pub").write_text("short")
    with pytest.raises(UserError, match=r"bad\.pub"):
        AllowList(tmp_path / "clients")
    (tmp_path / "worker.key").write_text("\x7f" * 40)
    with pytest.raises(UserError, match=r"worker\.key"):
        read_client_keys(tmp_path, "worker")


@pytest.mark.parametrize("role", ["", " ", " king", " worker trainer"])
def test_a_client_without_a_role_is_named(tmp_path: Path, role: str) -> None:
    make_keys(tmp_path)
    (tmp_path / "clients" / "old.pub").write_text("x" * 40 + role)
    with pytest.raises(UserError, match=r"old\.pub has no role"):
        AllowList(tmp_path / "clients")


def test_the_list_follows_its_folder(tmp_path: Path) -> None:
    make_keys(tmp_path)
    allowed = AllowList(tmp_path / "clients", ["x" * 40 + " reader"])
    assert {key: role for key, role in allowed.roles.items() if role == "reader"} == {
        read_client_keys(tmp_path, "reader").public: "reader",
        b"x" * 40: "reader",
    }
    make_client_keys(tmp_path, "guest", "operator")
    for role in ROLES:
        (tmp_path / "clients" / f"{role}.pub").unlink()
    allowed.refresh()
    assert allowed.roles == {read_client_keys(tmp_path, "guest").public: "operator", b"x" * 40: "reader"}
    (tmp_path / "clients" / "guest.pub").unlink()
    (tmp_path / "clients").rmdir()
    allowed.refresh()
    assert allowed.roles == {b"x" * 40: "reader"}


def test_a_file_that_is_just_being_copied_lets_nobody_in_and_ends_nothing(tmp_path: Path) -> None:
    make_keys(tmp_path)
    allowed = AllowList(tmp_path / "clients")
    before, file = allowed.roles, tmp_path / "clients" / "new.pub"
    file.write_text("")
    allowed.refresh()
    assert allowed.roles == before
    file.write_bytes(b"y" * 40 + b" reader")  # which does not change the folder's time stamp
    allowed.refresh()
    assert allowed.roles == {**before, b"y" * 40: "reader"}


def test_a_folder_that_was_away_counts_again_when_it_is_back(tmp_path: Path) -> None:
    make_keys(tmp_path)
    os.utime(tmp_path / "clients", (1, 1))  # long ago, so that the time stamp alone says that nothing changed
    allowed = AllowList(tmp_path / "clients")
    roles = allowed.roles
    (tmp_path / "clients").rename(tmp_path / "away")
    allowed.refresh()
    assert not allowed.roles
    (tmp_path / "away").rename(tmp_path / "clients")
    allowed.refresh()
    assert allowed.roles == roles != {}


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_can_enter_is_shown_no_key(tmp_path: Path, mode: int) -> None:
    make_keys(tmp_path / "keys")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    keys = read_client_keys(tmp_path / "keys", "worker")
    with pytest.raises(UserError, match="open"):
        Session(f"ipc://{tmp_path}/open/queue", "test", "t", keys).check_place()
    with pytest.raises(QueueLost, match="none"):
        Session(f"ipc://{tmp_path}/none/queue", "test", "t", keys).check_place()
