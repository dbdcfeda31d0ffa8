"""What a run checks between its preparation and its processes, and how it ends without its folder."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_async.configs.load import load_config
from rl_async.errors import ConfigError, QueueLost, UserError
from rl_async.launcher.runs.launch import check_chat, log_into, naming_deletion, unsaved

VLLM = ["rollout.engine=vllm"]  # whose start takes minutes


@pytest.mark.parametrize(
    "overrides",
    [["agent.unprinted_tools=allow", "agent.chat_format=plain"], ["agent.tools=[]", "agent.chat_format=gemma4"]],
)
def test_a_chat_format_that_does_not_go_with_the_model_is_found_before_engines_start(
    model_folder: Path, tmp_path: Path, overrides: list[str]
) -> None:
    with pytest.raises(ConfigError):
        check_chat(load_config("calculator", [f"model.path={model_folder}", *VLLM, *overrides]))
    check_chat(load_config("calculator", [f"model.path={tmp_path}/elsewhere", *VLLM, *overrides]))


def test_the_launcher_of_embedded_engines_leaves_that_to_the_workers(tmp_path: Path) -> None:
    """Its command imports neither torch nor Transformers, which would take a second before anything is started."""
    program = (
        "import sys; from pathlib import Path; from rl_async.configs.load import load_config;"
        "from rl_async.launcher.runs.launch import check_chat; import rl_async.launcher.runs.launch;"
        f"check_chat(load_config('calculator', ['model.path={tmp_path}']));"
        "found = {'torch', 'transformers', 'pyarrow', 'pandas'} & sys.modules.keys(); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_record_that_is_not_whole_is_found_where_the_model_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.replay"):
        check_chat(load_config("calculator", [f"model.path={tmp_path}/elsewhere", f"rollout.replay={tmp_path}"]))


def _lose(path: Path) -> None:
    raise QueueLost(str(path))


@pytest.mark.parametrize("fails", [Path.read_bytes, _lose])
def test_a_run_whose_folder_was_deleted_ends_with_its_name(tmp_path: Path, fails: Callable[[Path], object]) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    with pytest.raises((OSError, QueueLost)), log_into(folder), naming_deletion(folder):
        fails(folder / "missing")
    (folder / "config.yaml").touch()
    with pytest.raises((OSError, QueueLost)), log_into(folder), naming_deletion(folder):
        shutil.rmtree(folder / "logs")  # alone, for room
        fails(folder / "missing")
    (folder / "logs").mkdir()
    with pytest.raises(UserError, match=str(folder)), log_into(folder), naming_deletion(folder):
        shutil.rmtree(folder)
        folder.mkdir()  # as a process of the run may that goes on writing
        fails(folder / "missing")


@pytest.mark.parametrize(
    ("trained", "kept", "said"),
    [
        (0, [], ()),
        (4, [4], ()),
        (4, [2, 4], ()),
        (5, [4], ("step 4 is", "step 4")),
        (3, [], ("steps 0 to 2 are", "step 0")),
    ],
)
def test_steps_that_a_stop_could_not_save_are_named(
    tmp_path: Path, trained: int, kept: list[int], said: tuple[str, ...]
) -> None:
    lines = [f'{{"step":{step},"version":{step + 1}}}\n' for step in range(trained)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    for step in kept:
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").touch()
    text = unsaved(tmp_path)
    assert all(part in text for part in said) and bool(text) == bool(said)
