"""Who may be behind a socket file."""

from pathlib import Path

import pytest

from rl_async.errors import QueueLost, UserError
from rl_async.transfer_queue.auth.keys import make_keys, read_client_keys
from rl_async.transfer_queue.conversations import Session


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
