"""``rl-async reward test``: scores answers as a run would, and shows the text extracted from each."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from rl_async.agent_loop.chat_formats.format import said_text
from rl_async.configs.derived import eval_parts, parts
from rl_async.configs.schema.data import DataSource
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import DataError
from rl_async.extraction import Extraction, trace
from rl_async.files import DAMAGE
from rl_async.launcher.sources import data_files
from rl_async.messages import Sampling, Task, Trajectory, Turn
from rl_async.reward_loop.service import RewardService, as_conversation, seen_by
from rl_async.transfer_queue.dataset import open_rows, templated, to_task
from rl_async.transfer_queue.images import folder_of

# At most this many characters of a text are shown.
SHOWN = 80


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the answers' file. ``row`` counts rows of the data set from 0; it defaults to the line's number."""

    answer: str
    row: int | None = None


class Scored(NamedTuple):
    """One answer's row and task, and its scored trajectory."""

    row: int
    task: Task
    trajectory: Trajectory


async def score_answers(config: RunConfig, data: str, answers: Path) -> list[Scored]:
    """Score every answer in the file against its row of the data set. Raises DataError naming the line."""
    given = list(_read(answers))
    tasks = _tasks(_source(config, data), config.seed, [row for row, _ in given])
    scored = []
    async with RewardService(config.reward, sandbox=config.sandbox) as service:
        for (row, answer), task in zip(given, tasks, strict=True):
            trajectory = answered(task, answer)
            await service.score(task, trajectory)
            scored.append(Scored(row, task, trajectory))
    return scored


def report(config: RunConfig, scored: Sequence[Scored]) -> list[str]:
    """Return lines for each answer, with its reward, its parts and the steps of extractions, and the mean reward."""
    lines = []
    for row, task, trajectory in scored:
        failed = "" if trajectory.scored else f"; not scored: {trajectory.error}"
        lines.append(f"row {row}: reward {trajectory.reward:g}{failed}")
        lines.append(f"  answer       {_short(trajectory.turns[-1].text)}")
        lines.append(f"  ground truth {_short(task.ground_truth)}")
        for term in config.reward.functions:
            value = trajectory.reward_parts.get(term.name)
            lines.append(f"  {term.name} {'failed' if value is None else f'{value:g}'} (weight {term.weight:g})")
            reason = trajectory.reward_reasons.get(term.name)
            lines += [f"    reason: {_short(reason[:SHOWN])}"] if reason else []
            more = {key: number for key, number in trajectory.reward_parts.items() if key.startswith(f"{term.name}/")}
            lines += [f"    {key.removeprefix(f'{term.name}/')} {number:g}" for key, number in more.items()]
            lines += [f"    {step}" for step in _steps(seen_by(term, as_conversation(task, trajectory)), term.extract)]
    rewards = [trajectory.reward for _, _, trajectory in scored if trajectory.scored]
    mean = f"mean reward {sum(rewards) / len(rewards):.4f}" if rewards else "no reward"
    some = f", {len(rewards)} scored" if len(rewards) < len(scored) else ""
    return [*lines, f"{len(scored)} answers{some}, {mean}"]


def _steps(answer: str, chain: Extraction) -> list[str]:
    try:
        steps = trace(answer, chain)
    except TimeoutError as error:
        return [str(error)]
    return [f"{rule}: {'found nothing, so this part is 0' if text is None else _short(text)}" for rule, text in steps]


def _source(config: RunConfig, data: str) -> DataSource:
    """Return the config's data set with this path, or one without templates, with its files on this machine."""
    sets = [("data.path", part) for part in parts(config.data)]
    sets += [("data.eval_path", part) for part in eval_parts(config.data)]
    key, source = next((found for found in sets if found[1].path == data), ("data.path", DataSource(path=data)))
    return msgspec.structs.replace(source, path=data_files(data, key))


def _read(file: Path) -> Iterator[tuple[int, str]]:
    """Yield each answer with its row. Raises DataError naming the line."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"--answers: {file}: {error.strerror}") from error
    filled = [(number, line) for number, line in enumerate(lines) if line.strip()]
    if not filled:
        raise DataError(f'--answers: {file} is empty; write {{"answer": TEXT}} on each line')
    for number, line in filled:
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except DAMAGE as error:
            raise DataError(
                f'--answers: {file}, line {number + 1}: {error}; write {{"answer": TEXT}}, and "row": N for another row'
            ) from error
        yield number if answer.row is None else answer.row, answer.answer


def _tasks(source: DataSource, seed: int, numbers: Sequence[int]) -> list[Task]:
    rows = open_rows(source.path, seed=seed, parameters=source.parameters)
    tasks = []
    for number in numbers:
        if not 0 <= number < len(rows):
            raise DataError(f"--answers: {source.path} has no row {number}; it has {len(rows)}, counted from 0")
        place = f"{source.path}, row {number}"
        tasks.append(to_task(templated(rows[number], source, place), place, f"{number}", folder_of(source.path)))
    return tasks


def answered(task: Task, answer: str) -> Trajectory:
    """Make a finished episode, without tokens, of an answer that no engine sampled."""
    said = [Turn(role=message["role"], text=said_text(message)) for message in task.prompt]
    return Trajectory(
        task_id=task.task_id,
        group_id=0,
        sample=0,
        attempt=0,
        episode_id=task.task_id,
        token_ids=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, np.bool_),
        logprobs=np.zeros(0, np.float32),
        versions=[],
        sampling=Sampling(),
        reward=0.0,
        turns=[*said, Turn(role="assistant", text=answer)],
    )


def _short(text: str) -> str:
    """Quote a text, keeping only the end of a long one, where answers tend to be."""
    return json.dumps(text if len(text) <= SHOWN else f"...{text[-SHOWN:]}", ensure_ascii=False)
