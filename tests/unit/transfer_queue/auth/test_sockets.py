"""Where the socket files of a run are, and who may be behind one."""

from pathlib import Path

import pytest

from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.queue import QueueConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import QueueLost, UserError
from rl_async.transfer_queue.auth.keys import make_keys, read_client_keys
from rl_async.transfer_queue.auth.sockets import make_private, place_sockets, socket_folder
from rl_async.transfer_queue.client.session import Session


def config(**queue: str) -> RunConfig:
    return RunConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"), queue=QueueConfig(**queue))


def test_only_its_user_enters_a_run_s_folder_of_socket_files_while_the_run_lasts(tmp_path: Path) -> None:
    folder = socket_folder(tmp_path)
    with place_sockets(config(), tmp_path):
        assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
        (folder / "queue").touch()
    assert not folder.exists()
    with place_sockets(config(host="10.0.0.1"), tmp_path):
        assert not folder.exists(), "it has an address"


def test_a_path_of_any_length_has_short_socket_files() -> None:
    assert len(str(socket_folder(Path("/x" * 500)) / "shard-1000")) < 100  # a socket file's path ends at 107


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_can_enter_is_shown_no_key(tmp_path: Path, mode: int) -> None:
    make_keys(tmp_path / "keys")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(UserError, match="TMPDIR"):
        make_private(tmp_path / "open")
    keys = read_client_keys(tmp_path / "keys", "worker")
    with pytest.raises(UserError, match="open"):
        Session(f"ipc://{tmp_path}/open/queue", "test", "t", keys).check_place()
    with pytest.raises(QueueLost, match="none"):
        Session(f"ipc://{tmp_path}/none/queue", "test", "t", keys).check_place()
