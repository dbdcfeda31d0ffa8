"""An evaluation as JSON lines: one for each episode, and role (``rl-async eval --jsonl``)."""

import zlib
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path

import msgspec

from rl_async.errors import UserError
from rl_async.files import DAMAGE, written_whole
from rl_async.messages import Trajectory, Turn, role_rewards

Prompt = Sequence[tuple[str, str]]  # role and text of each message before the policy's first turn


class EpisodeLine(msgspec.Struct, kw_only=True):
    """One held-out episode; of an episode of several roles, one of them."""

    source: str
    task: str
    sample: int
    role: str
    reward: float
    scored: bool
    finish_reason: str
    ground_truth: str
    prompt: list[tuple[str, str]]
    answer: str
    error: str


def write_lines(path: Path, rows: Iterable[Trajectory]) -> None:
    """Write a line for each episode and role, in the order of their groups, whole or not at all."""
    rows = sorted(rows, key=lambda row: row.key)
    rewards = role_rewards(row.header() for row in rows)
    last = {(row.group_id, row.sample, row.role): row for row in rows}
    with written_whole(path) as partial, partial.open("wb") as file:
        for player, row in last.items():
            line = EpisodeLine(
                source=row.data_source,
                task=row.task_id,
                sample=row.sample,
                role=row.role,
                reward=rewards.get(player, 0.0),
                scored=player in rewards,
                finish_reason=row.finish_reason,
                ground_truth=row.ground_truth,
                prompt=[*prompt_of(row.turns)],
                answer=last_answer(row.turns),
                error=row.error,
            )
            file.write(msgspec.json.encode(line) + b"\n")


def read_lines(path: Path) -> list[EpisodeLine]:
    """Read what ``write_lines`` wrote. Raises UserError, naming the line that is no episode."""
    found = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                found.append(msgspec.json.decode(line, type=EpisodeLine))
            except DAMAGE as error:
                raise UserError(f"{path}, line {number} is none of `rl-async eval --jsonl`: {error}") from error
    return found


def prompt_of(turns: Sequence[Turn]) -> Prompt:
    """Return what was said before the policy's first turn."""
    return [(turn.role, turn.text) for turn in takewhile(lambda turn: turn.role != "assistant", turns)]


def number_of(prompt: Prompt) -> int:
    """Return a number that the same prompts share."""
    return zlib.crc32(msgspec.json.encode(prompt))


def question_of(prompt: Prompt) -> str:
    """Return what the user said last; empty if there is no user."""
    return next((text for role, text in reversed(prompt) if role == "user"), "")


def last_answer(turns: Sequence[Turn]) -> str:
    """Return the policy's last turn; empty if it had none."""
    return next((turn.text for turn in reversed(turns) if turn.role == "assistant"), "")
