"""``rl-async replay``: plays a recorded episode again with its sampled answers, without an engine.

Tools, environment and rewards run in their present versions; their answers are compared with the recorded ones.
"""

import gzip
import re
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from rl_async.agent_loop.chat_formats.format_registry import load_format
from rl_async.agent_loop.episode import session_of
from rl_async.agent_loop.worker import runner_and_rewards
from rl_async.configs.load import load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import UserError
from rl_async.insight.show import place_of
from rl_async.messages import LeasedGroup, Trajectory, Turn, Version, VersionRun, by_role
from rl_async.recording import read_trajectories
from rl_async.reward_loop.api import is_time
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.transfer_queue.dataset import find_task

EPISODE = re.compile(r"\d+\.\d+(\.\d+)?")
# At most this many characters of a text are shown.
SHOWN = 300


class Fact(NamedTuple):
    """An answer of a tool, the environment or a reward in an episode."""

    place: str
    text: str


class RecordedAnswers:
    """An engine that repeats the recorded answers of each role's conversation, and gives empty ones after the last."""

    def __init__(self, rows: Sequence[Trajectory], stop_token_ids: Sequence[int]) -> None:
        self._answers = {
            session_of(own[0].episode_id, own[0].role): deque(answer for row in own for answer in _sampled(row))
            for own in by_role(rows)
        }
        self._stops = stop_token_ids

    @property
    def unused(self) -> int:
        """The number of answers that were not requested."""
        return sum(map(len, self._answers.values()))

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        """Return the next answer of a conversation; after the last one, an aborted empty answer."""
        if not self._answers.get(session):
            return GenerateResult(token_ids=[], logprobs=[], versions=[], finish_reason="abort")
        answer = self._answers[session].popleft()
        return GenerateResult(
            token_ids=answer,
            logprobs=[0.0] * len(answer),
            versions=[VersionRun(Version(), 0, len(answer))],
            finish_reason="stop" if answer[-1] in self._stops else "length",
        )


async def replay_episode(run: Path, episode: str) -> tuple[list[str], bool]:
    """Play an episode of ``run`` again; return lines that compare the two, and whether they are the same.

    Raises UserError if the episode, its task, its model or its tools cannot be found.
    """
    config = load_resolved(run / "config.yaml")
    _require_playable(run, config)
    recorded = find_episode(run / "trajectories", episode)
    last = recorded[-1]
    group = LeasedGroup(
        group_id=last.group_id,
        partition=last.partition,
        attempt=last.attempt,
        samples=[last.sample],
        task=find_task(config, last.task_id, last.partition),
        min_version=Version(),
    )
    chat = load_format(config.model.path, config.agent)
    answers = RecordedAnswers(recorded, chat.stop_token_ids)
    with tempfile.TemporaryDirectory() as logs:
        playing = runner_and_rewards(config, chat, answers, run, logs=Path(logs), owner="replay")
        async with playing as (runner, rewards):
            rows = await runner.run(group, last.sample)
            for *others, last in by_role(rows):
                await rewards.score(group.task, last, *others)
    lines, same = compare(facts(recorded), facts(rows))
    if answers.unused:
        lines.append(f"the episode ended {answers.unused} answers earlier than the recorded one")
    return [f"episode {last.episode_id}, task {last.task_id}", *lines], same and not answers.unused


def _require_playable(run: Path, config: RunConfig) -> None:
    """Raise UserError if playing an episode needs a part of the live run, such as its policy or reward model."""
    agent, reward = config.agent, config.reward
    if agent.gateway is not None:
        raise UserError(f"{run}: agent programs played its episodes, which cannot be played again without them")
    if agent.environment == "simulated_user" and not (agent.user and agent.user.url):
        raise UserError(
            f"agent.user.url: the policy played the users of {run}, and what it said as one was not recorded, so its "
            "episodes cannot be played again"
        )
    if own := [role for role, opponent in agent.opponents.items() if not opponent.url]:
        raise UserError(
            f"agent.opponents.{own[0]}.url: the policy played this role in {run} without training it, and what it said "
            "was not recorded, so its episodes cannot be played again"
        )
    own_model = reward.model is not None and not reward.model.url
    if own_model and "reward_model" in {term.name for term in reward.functions}:
        raise UserError(
            f"reward.model.url: the reward model of {run} ended with the run, so its episodes cannot be scored again"
        )


def find_episode(folder: Path, episode: str) -> list[Trajectory]:
    """Return the rows of the newest episode called GROUP.SAMPLE or GROUP.SAMPLE.ATTEMPT.

    Raises UserError if it was not recorded.
    """
    if not EPISODE.fullmatch(episode):
        raise UserError(f"{episode!r} names no episode; give GROUP.SAMPLE, as `rl-async show RUN` lists them")
    sought = f'"episode_id":"{episode}'.encode()
    files = sorted(folder.glob("step-*.jsonl.gz"), key=place_of, reverse=True)
    # Each rank writes a file per step.
    for _, of_a_step in groupby(files, place_of):
        rows = [row for path in of_a_step if _mentions(path, sought) for row in read_trajectories(path)]
        if rows := [row for row in rows if f"{row.episode_id}.".startswith(f"{episode}.")]:
            return sorted(rows, key=lambda row: row.segment)
    raise UserError(f"{folder} has no episode {episode}; give GROUP.SAMPLE, as `rl-async show RUN` lists them")


def _mentions(path: Path, sought: bytes) -> bool:
    with gzip.open(path, "rb") as file:
        return any(sought in line for line in file)


def facts(rows: Sequence[Trajectory]) -> list[Fact]:
    """List the answers of tools, environment and rewards in an episode, in order, without measured times."""
    return [
        Fact(f"{own[0].role}: {place}" if own[0].role else place, text)
        for own in by_role(rows)
        for place, text in _facts_of_role(own)
    ]


def _facts_of_role(rows: Sequence[Trajectory]) -> list[Fact]:
    last = rows[-1]
    # Of the rows that contain a turn, the one that records its reward counts.
    turns = [
        max((row.turns[n] for row in rows if n < len(row.turns)), key=lambda turn: turn.reward is not None)
        for n in range(len(last.turns))
    ]
    found = [fact for number, turn in enumerate(turns) for fact in _facts_of_turn(number, turn)]
    found.append(Fact("finish reason", last.finish_reason))
    parts = [(name, value) for name, value in sorted(last.reward_parts.items()) if not is_time(name)]
    found += [Fact(f"reward {name}", f"{value:g}") for name, value in parts]
    return [*found, Fact("reward", f"{last.reward:g}" if last.scored else f"not scored: {last.error}")]


def compare(before: Sequence[Fact], now: Sequence[Fact]) -> tuple[list[str], bool]:
    """Return a line for each equal fact and three for each that differs, and whether all are equal."""
    lines, same = list[str](), True
    then, latest = dict(before), dict(now)
    for place in dict.fromkeys([*then, *latest]):
        if then.get(place) == latest.get(place):
            lines.append(f"{place}: {_short(then[place])}")
        else:
            same = False
            lines.append(f"{place} DIFFERS")
            for when, at in (("recorded", then), ("now     ", latest)):
                lines.append(f"  {when}: {_short(at[place]) if place in at else 'nothing'}")
    return lines, same


def _facts_of_turn(number: int, turn: Turn) -> Iterator[Fact]:
    for place, call in enumerate(turn.tool_calls):
        yield Fact(f"turn {number}, call {place} of {call.name}", call.result)
    if turn.role != "assistant":
        yield Fact(f"turn {number}, {turn.role}", turn.text)
    if turn.reward is not None:
        yield Fact(f"turn {number}, reward", f"{turn.reward:g} {turn.reason}".strip())


def _sampled(row: Trajectory) -> Iterator[list[int]]:
    """Yield the tokens of each sampled answer in a row."""
    for sampled, places in groupby(range(len(row.token_ids)), key=lambda place: bool(row.loss_mask[place])):
        if sampled:
            yield row.token_ids[np.fromiter(places, int)].tolist()


def _short(text: str) -> str:
    return msgspec.json.encode(text if len(text) <= SHOWN else f"{text[:SHOWN]}...").decode()
