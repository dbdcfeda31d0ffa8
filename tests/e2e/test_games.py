"""Whole runs of a game of two roles: played in a host, trained and audited, and trained again from its record."""

import json
import re
import tarfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from rl_async.messages import Trajectory, by_role
from rl_async.recording import read_trajectories
from tests.e2e import small_runs as command
from tests.e2e.small_runs import HARDLY_WARM, succeed

GAME = """
from rl_async.agent_loop.tools.tool import Step


class Echo:
    roles = ("first", "second")

    def __init__(self, task):
        self.said = []

    def reset(self):
        return Step("speak", to="first")

    def step(self, answer):
        self.said.append(answer)
        to = self.roles[len(self.said) % 2]
        return Step(f"{len(answer)}", to=to, done=len(self.said) == 3, reason="heard")

    def reward(self):
        first, *others = [len("".join(said.split())) for said in self.said] or [0]
        return {"first": 1.0 + first % 3, "second": -1.0 - sum(others) % 3}
"""
LAUNCH = [
    *("launch", "--mode", "disaggregated", "--config", "calculator", *HARDLY_WARM),
    *("agent.environment=game.py:Echo", "agent.environment_hosts={}", "agent.tools=[]", "agent.max_tokens=160"),
    *("reward.functions=[{name: environment}]", "data.eval_path=null", "trainer.steps=2"),
    *("data.train_batch_groups=3", "rollout.group_size=4", "rollout.max_tokens=12"),
]


def rewards_of(rows: Sequence[Trajectory]) -> dict[str, float]:
    """What the game gives for the words that it heard in an episode."""
    heard: dict[str, list[int]] = {"first": [], "second": []}
    for row in rows:
        heard[row.role] = [len("".join(turn.text.split())) for turn in row.turns if turn.reason == "heard"]
    first, *later = heard["first"] or [0]
    return {"first": 1 + first % 3, "second": -1 - sum(later + heard["second"]) % 3}


@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_each_role_of_a_game_is_trained_and_can_be_trained_again(workplace: Path) -> None:
    (workplace / "game.py").write_text(GAME)
    succeed(workplace, *LAUNCH, "--name", "game")
    run = workplace / "runs/game"
    assert "ok" in succeed(workplace, "audit", str(run))
    episodes = defaultdict(list)
    for file in sorted((run / "trajectories").glob("step-*")):
        for row in read_trajectories(file):
            episodes[row.episode_id].append(row)
    assert len(episodes) == 2 * 3 * 4
    played = [[own[0].role for own in by_role(rows)] for rows in episodes.values()]
    assert ["first", "second"] in played and all(roles[0] == "first" for roles in played)
    assert all([row.segment for row in rows] == list(range(len(rows))) for rows in episodes.values())
    for rows in episodes.values():
        expected = rewards_of(rows)
        assert all(row.reward == expected[row.role] for row in rows), "each role has its own reward"
    assert {row.role for rows in episodes.values() for row in rows if row.reward} == {"first", "second"}
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all("reward/mean/first" in step for step in steps) and any("reward/mean/second" in step for step in steps)

    succeed(workplace, *LAUNCH, "--name", "again", f"rollout.replay={run}")
    again = [json.loads(line) for line in (workplace / "runs/again/metrics.jsonl").read_text().splitlines()]
    for key in ("loss/policy", "loss/grad_norm", "reward/mean/first"):
        assert [step[key] for step in again] == [step[key] for step in steps]


# Whole commands beside a plain launch: `eval` and `compare`, a pretrained start, a run of an earlier version.


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_evaluation_ends_with_a_table_and_its_episodes(workplace: Path) -> None:
    wanted = ("eval.tasks=4", "eval.samples=2", "rollout.max_tokens=8", "--jsonl", "episodes.jsonl")
    said = succeed(workplace, "eval", "--config", "calculator", *HARDLY_WARM, *wanted)
    assert "avg@k" in said and "pass@k" in said
    episodes = [json.loads(line) for line in (workplace / "episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == 8 and len({(each["task"], each["sample"]) for each in episodes}) == 8
    assert all(each["scored"] and each["answer"] for each in episodes)
    (run,) = (workplace / "runs").glob("eval-*")
    compared = json.loads(succeed(workplace, "compare", f"{run}@0", str(run), "--json"))
    assert (compared["sources"][0]["tasks"], compared["sources"][0]["p"], compared["left_out"]) == (4, 1.0, 0)


MODEL = "artifacts/smollm2-tools/model"
SMALL = [
    *("model.dtype=float32", "rollout.max_model_len=512", "agent.max_tokens=512", "launcher.threads=1"),
    *("trainer.steps=2", "data.train_batch_groups=2", "rollout.group_size=2", "trainer.checkpoint_every=0"),
    *("eval.tasks=4", "warm_start.pretrained={path: base, batch_size: 114}"),
]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_command_fine_tunes_and_trains_with_both_tools(tmp_path: Path) -> None:
    base = ("model.path=base", "warm_start.out=base", "rollout.max_model_len=512")
    succeed(tmp_path, "sft", "--config", "calculator", *HARDLY_WARM, *base)
    launch = ("launch", "--mode", "disaggregated", "--config", "smollm2-tools", "--name", "tools")
    shown = succeed(tmp_path, *launch, *SMALL)
    assert re.search(r"held-out loss per token \S+ before, \S+ after; model: " + MODEL, shown)
    assert (tmp_path / MODEL / "sft.json").is_file()
    log = [json.loads(line) for line in (tmp_path / "runs" / "tools" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [0, 1]
    assert "ok: every admitted group" in succeed(tmp_path, "audit", "runs/tools")
    assert f"{MODEL} exists" in succeed(tmp_path, "sft", "--config", "smollm2-tools", *SMALL)


# The folder of a run of four steps with a checkpoint, its journal and its trajectories, and the data and model it used.
KEPT = Path(__file__).with_name("kept_run.tar.xz")


@pytest.mark.e2e
@pytest.mark.slow
def test_a_run_of_an_earlier_commit_is_shown_and_resumed(tmp_path: Path) -> None:
    with tarfile.open(KEPT) as archive:
        archive.extractall(tmp_path, filter="data")
    run, config = "runs/kept", "runs/kept/config.yaml"
    assert "step 1" in command.succeed(tmp_path, "show", run, "--step", "1")
    again = ("--mode", "disaggregated", "--config", config, "--name", "kept", "--resume", "trainer.steps=6")
    command.succeed(tmp_path, "launch", *again)
    lines = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["lineage"], line["step"]) for line in lines if "reward/mean" in line] == [
        *((0, step) for step in range(4)),
        *((1, step) for step in range(4, 6)),
    ]
    audited = command.succeed(tmp_path, "audit", run)
    assert audited.startswith("24 groups admitted, 0 given up, 24 trained with 48 rows\nok: "), audited
