"""Whole runs of a game of two roles: played in a host, trained and audited, and trained again from its record."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from rl_async.messages import Trajectory, by_role
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
