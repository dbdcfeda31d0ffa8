"""Whole runs of a game of two roles: played in a host, trained and audited, and trained again from its record."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from rl_async.messages import by_role
from rl_async.recording import read_trajectories
from tests.e2e.command import HARDLY_WARM, succeed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
GAME = """
from rl_async.agent_loop.step import Step


class Echo:
    roles = ("first", "second")

    def __init__(self, task):
        self.said = []

    def reset(self):
        return Step("speak", to="first")

    def step(self, answer):
        self.said.append(answer)
        return Step(f"{len(answer)}", to=self.roles[len(self.said) % 2], done=len(self.said) == 3)

    def reward(self):
        first, *others = map(len, self.said) if self.said else (0,)
        return {"first": float(first % 3), "second": -float(sum(others) % 3)}
"""
LAUNCH = [
    *("launch", "--mode", "disaggregated", "--config", "calculator", *HARDLY_WARM),
    *("agent.environment=game.py:Echo", "agent.environment_hosts={}", "agent.tools=[]", "agent.max_tokens=160"),
    *("reward.functions=[{name: environment}]", "data.eval_path=null", "trainer.steps=2"),
    *("data.train_batch_groups=3", "rollout.group_size=4", "rollout.max_tokens=12"),
]


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
    for row in (row for rows in episodes.values() for row in rows):
        assert 0 <= row.reward * {"first": 1, "second": -1}[row.role] <= 2, "each role has its own reward"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all("reward/mean/first" in step for step in steps) and any("reward/mean/second" in step for step in steps)

    succeed(workplace, *LAUNCH, "--name", "again", f"rollout.replay={run}")
    again = [json.loads(line) for line in (workplace / "runs/again/metrics.jsonl").read_text().splitlines()]
    for key in ("loss/policy", "loss/grad_norm", "reward/mean/first"):
        assert [step[key] for step in again] == [step[key] for step in steps]
