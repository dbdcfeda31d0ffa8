"""``rl-async replay``: a recorded episode again, with tools and rewards as they are now."""

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.toy_tasks import KINDS
from rl_async.configs.load import dump, load_config
from rl_async.errors import EXIT_USER
from rl_async.launcher.cli.__main__ import main
from rl_async.launcher.runs.replay_episode import find_episode
from rl_async.recording import read_trajectories, write_trajectories
from rl_async.reward_loop.service import RewardService
from rl_async.transfer_queue.dataset import find_task
from tests.unit.agent_loop.fakes import ScriptedEngine, leased

CALL = '<tool_call>\n{"name":"price","arguments":{"item":"x"}}\n</tool_call>'


def renderer_in(folder: Path) -> ChatRenderer:
    source, shop = random.Random(5), KINDS["shop"]
    samples = [shop.sample(source) for _ in range(50)]
    assert shop.demonstrate is not None
    talks = [[{"role": "user", "content": s.prompt}, *shop.demonstrate(s, source)] for s in samples]
    tokenizer = train_tokenizer(talks, 200)
    tokenizer.save_pretrained(folder)
    return ChatRenderer(tokenizer)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with one episode of two answers, whose tool says what stands in ``price.txt``."""
    run = tmp_path_factory.mktemp("run")
    (run / "price.txt").write_text("5")
    (run / "tools.py").write_text(
        "from pathlib import Path\n\n\ndef price(item: str) -> str:\n"
        '    """The price."""\n'
        '    return (Path(__file__).parent / "price.txt").read_text()\n'
    )
    tasks = [{"prompt": f"price {n}?", "reward_model": {"ground_truth": "5"}} for n in range(3)]
    (run / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    values = {
        "model": {"path": str(run / "model")},
        "data": {"path": str(run / "tasks.jsonl")},
        "agent": {"loop": "tool_agent", "tools": [f"{run}/tools.py:price"], "unprinted_tools": "allow"},
    }
    config, renderer = load_config(values), renderer_in(run / "model")
    (run / "config.yaml").write_text(dump(config))

    async def play() -> None:
        task = find_task(config, "tasks:1", "train")
        group = leased(task_id=task.task_id)
        group.task = task
        rows = await EpisodeRunner(config, renderer, ScriptedEngine(renderer, [CALL, "5"])).run(group, 0)
        async with RewardService(config.reward) as rewards:
            await rewards.score(task, rows[-1])
        write_trajectories(run / "trajectories" / "step-000000-lineage0-rank0.jsonl.gz", rows)

    asyncio.run(play())
    return run


def test_an_episode_whose_tools_say_the_same_is_the_same(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded), "7.0"]) == 0
    out = capsys.readouterr().out
    assert "DIFFERS" not in out and 'call 0 of price: "5"' in out and 'reward: "1"' in out


def test_what_differs_is_shown_beside_what_was_recorded(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recorded / "price.txt").write_text("6")
    try:
        assert main(["replay", str(recorded), "7.0.1"]) == 1
    finally:
        (recorded / "price.txt").write_text("5")
    out = capsys.readouterr().out
    assert "call 0 of price DIFFERS" in out and 'recorded: "5"' in out and 'now     : "6"' in out
    assert 'reward: "1"' in out  # the policy said 5 all the same


@pytest.mark.parametrize("episode", ["8.0", "7", "7.0.2", "7.1"])
def test_an_episode_that_was_not_recorded_is_a_users_error(recorded: Path, episode: str) -> None:
    assert main(["replay", str(recorded), episode]) == EXIT_USER


def test_measured_times_are_not_compared(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(recorded, tmp_path / "run")
    file = run / "trajectories" / "step-000000-lineage0-rank0.jsonl.gz"
    (row,) = read_trajectories(file)
    row.reward_parts |= {"code/seconds": 0.5, "code/test_0_s": 0.5}
    write_trajectories(file, [row])
    assert main(["replay", str(run), "7.0"]) == 0
    assert "code/" not in capsys.readouterr().out
    row.reward_parts["code/passed"] = 1.0
    write_trajectories(file, [row])
    assert main(["replay", str(run), "7.0"]) == 1


def test_an_episode_is_found_in_the_files_of_all_ranks_of_its_newest_step(recorded: Path, tmp_path: Path) -> None:
    (row,) = read_trajectories(recorded / "trajectories" / "step-000000-lineage0-rank0.jsonl.gz")
    for step, lineage, rank, segment in (
        (2, 9, 0, 5),
        (999_999, 10, 0, 6),
        (1_000_000, 10, 0, 1),
        (1_000_000, 10, 1, 0),
    ):
        row.segment = segment
        write_trajectories(tmp_path / f"step-{step:06d}-lineage{lineage}-rank{rank}.jsonl.gz", [row])
    assert [found.segment for found in find_episode(tmp_path, "7.0")] == [0, 1]


@pytest.mark.parametrize(
    "values",
    [
        {"agent": {"environment": "simulated_user", "user": {"system": "You want {ground_truth}."}}},
        {"reward": {"functions": [{"name": "reward_model"}], "model": {"path": "model"}}},
    ],
)
def test_what_only_the_run_had_is_a_users_error(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any]
) -> None:
    run = shutil.copytree(recorded, tmp_path / "run")
    config = {"model": {"path": str(run / "model")}, "data": {"path": str(run / "tasks.jsonl")}, **values}
    (run / "config.yaml").write_text(dump(load_config(config)))
    assert main(["replay", str(run), "7.0"]) == EXIT_USER
    assert ".url" in capsys.readouterr().err


GAME = """
from pathlib import Path

from rl_async.agent_loop.step import Step


class Game:
    roles = ("speaker", "listener")

    def __init__(self, task):
        self.answers = []

    def reset(self):
        return Step("speak", to="speaker")

    def step(self, answer):
        self.answers.append(answer)
        to = self.roles[len(self.answers) % 2]
        return Step((Path(__file__).parent / "said.txt").read_text(), to=to, done=len(self.answers) == 4)

    def reward(self):
        return {"speaker": float(self.answers == ["a", "b", "c", "d"]), "listener": 0.5}
"""


def test_roles_say_again_what_each_has_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "said.txt").write_text("go on")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "a game", "reward_model": {"ground_truth": ""}}))
    values = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "tasks.jsonl")},
        "agent": {"loop": "tool_agent", "environment": f"{tmp_path}/game.py:Game", "unprinted_tools": "allow"},
        "reward": {"functions": [{"name": "environment"}]},
    }
    config, renderer = load_config(values), renderer_in(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(dump(config))

    async def play() -> None:
        group = leased(task_id="tasks:0")
        group.task = find_task(config, "tasks:0", "train")
        rows = await EpisodeRunner(config, renderer, ScriptedEngine(renderer, ["a", "b", "c", "d"])).run(group, 0)
        async with RewardService(config.reward) as rewards:
            for row in rows:
                await rewards.score(group.task, row)
        write_trajectories(tmp_path / "trajectories" / "step-000000-lineage0-rank0.jsonl.gz", rows)

    asyncio.run(play())
    assert main(["replay", str(tmp_path), "7.0"]) == 0
    out = capsys.readouterr().out
    assert 'speaker: reward: "1"' in out and 'listener: reward: "0.5"' in out and "DIFFERS" not in out
    (tmp_path / "said.txt").write_text("stop")
    assert main(["replay", str(tmp_path), "7.0"]) == 1
    assert "listener: turn 2, user DIFFERS" in capsys.readouterr().out
    config = load_config({**values, "agent": {**values["agent"], "opponents": {"listener": {}}}})
    (tmp_path / "config.yaml").write_text(dump(config))
    assert main(["replay", str(tmp_path), "7.0"]) == EXIT_USER
    assert "agent.opponents.listener.url" in capsys.readouterr().err
