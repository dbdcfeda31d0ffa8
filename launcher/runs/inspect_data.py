"""What a run would make of data and of answers: ``rl-async data inspect`` and ``rl-async reward test``.

``inspect`` says what a data set has, what a run would make of it, and what it lacks. ``score_answers`` scores answers
as a run would, and shows the text extracted from each.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rl_async.configs.derived import eval_parts, label_of, parts
from rl_async.configs.schema.data import DataSource
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import DataError
from rl_async.extraction import Extraction, trace
from rl_async.files import DAMAGE
from rl_async.launcher.plan.trials import schemas_of
from rl_async.launcher.runs.rehearsal import answered, load_chat
from rl_async.launcher.sources import data_files
from rl_async.messages import Task, Trajectory
from rl_async.transfer_queue.chat_messages import prompt_length
from rl_async.transfer_queue.dataset import Rows, open_rows, templated, to_task
from rl_async.transfer_queue.images import folder_of, images_of, shown

# Rows of a generated data set that are read, examples of tasks, and characters of a value that are shown.
GENERATED = 1000
EXAMPLES = 2
SHOWN = 60
# What commands read other rows than tasks, by the columns that they need.
OTHERS = {
    ("messages",): "conversations, for `rl-async sft`",
    ("chosen", "rejected"): "preference pairs, for `rl-async dpo` and `rl-async reward-model`",
}


def inspect_config(config: RunConfig) -> Iterator[str]:
    """Describe the training and the held-out data of a config. Raises DataError for the first bad row."""
    for key, found in (("data.path", parts(config.data)), ("data.eval_path", eval_parts(config.data))):
        for part in found:
            yield f"{key}:"
            yield from inspect(msgspec.structs.replace(part, path=data_files(part.path, key)), config)


def inspect(part: DataSource, config: RunConfig | None = None) -> Iterator[str]:
    """Describe a data set: its columns, and the tasks that its templates make of the rows.

    With a ``config``, also count tokens and show a prompt as its model reads it, if the model is there. Raises
    DataError for the first bad row, after the columns, with the templates that might fit.
    """
    rows = open_rows(part.path, parameters=part.parameters)
    count = min(len(rows), GENERATED) if rows.generated else len(rows)
    yield f"{part.path}: {'generated; the first ' if rows.generated else ''}{count:,} rows"
    columns = _columns(islice(rows, count))
    width = max(map(len, columns), default=0)
    yield from (f"  {name:<{width}}  {column.described(count)}" for name, column in columns.items())
    kinds = [what for needed, what in OTHERS.items() if columns.keys() >= {*needed}]
    if kinds and not (part.prompt or "prompt" in columns):
        yield f"rows are {kinds[0]}"
        return
    tasks = list(_tasks(rows, part, count))
    yield from _described(tasks)
    if config is not None:
        yield from _rendered(tasks, part.path, config)
    for task in tasks[:EXAMPLES]:
        yield f"--- {task.task_id}"
        yield from (f"{m['role']}: {shown(m['content'], m.get('images', ()))}" for m in task.prompt)
        yield f"ground_truth: {task.ground_truth}"


class _Column:
    """The kinds of a column's values, its longest text, and its first value."""

    def __init__(self) -> None:
        self.kinds, self.longest, self.first = Counter[str](), 0, ""

    def add(self, value: Any) -> None:
        if value is None:
            return
        self.kinds[_kind(value)] += 1
        text = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
        self.longest = max(self.longest, len(text))
        self.first = self.first or text

    def described(self, rows: int) -> str:
        """Describe the column in a line."""
        kinds = " or ".join(kind for kind, _ in self.kinds.most_common())
        missing = rows - self.kinds.total()
        lacking = f", missing in {missing:,}" if missing else ""
        example = " ".join(self.first[: SHOWN + 1].split())
        example = example if len(example) <= SHOWN else f"{example[: SHOWN - 3]}..."
        return f"{kinds or 'empty'}, up to {self.longest:,} characters{lacking}: {example}"


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "true or false"
        case int() | float():
            return "number"
        case str():
            return "text"
        case [{"role": _}, *_]:
            return "messages"
        case list():
            return "list"
        case dict():
            return f"mapping of {', '.join(sorted(map(str, value)))}"
    return type(value).__name__


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, _Column]:
    found: dict[str, _Column] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, _Column()).add(value)
    return found


def _tasks(rows: Rows, part: DataSource, count: int) -> Iterator[Task]:
    label = label_of(part.path)
    for number, row in enumerate(islice(rows, count)):
        place = f"{part.path}, row {number}"
        yield to_task(templated(row, part, place), place, f"{label}:{number}", folder_of(part.path))


def _described(tasks: Sequence[Task]) -> Iterator[str]:
    different = len({msgspec.json.encode(task.prompt) for task in tasks})
    lengths = sorted(sum(len(message["content"]) for message in task.prompt) for task in tasks)
    yield f"rows are tasks, with {different:,} different prompts"
    if images := [len(images_of(task.prompt)) for task in tasks if images_of(task.prompt)]:
        size = sum(len(image) for task in tasks for image in images_of(task.prompt))
        yield f"images: {sum(images):,} in {len(images):,} prompts, at most {max(images)} in one, {size:,} bytes in all"
    yield f"prompt characters: shortest {lengths[0]}, median {lengths[len(lengths) // 2]}, longest {lengths[-1]}"
    yield f"data_source: {_counts(task.data_source or '(none)' for task in tasks)}"
    yield f"agent_name: {_counts(task.agent or '(the config decides)' for task in tasks)}"


def _counts(values: Iterable[str]) -> str:
    return ", ".join(f"{value} {count:,}" for value, count in Counter(values).most_common(10))


def _rendered(tasks: Sequence[Task], path: str, config: RunConfig) -> Iterator[str]:
    """Count tokens of prompts against the limit, and show the first prompt as the policy reads it.

    Raises DataError for the first prompt with a part that the chat template leaves out.
    """
    if not Path(config.model.path).is_dir():
        yield f"prompts are not rendered: model.path: there is no folder {config.model.path} yet"
        return
    # Imported only here, since it imports Transformers, which takes seconds.
    from rl_async.agent_loop.chat_formats.render import check_prompts

    schemas = {} if config.agent.gateway is not None else schemas_of(config.agent.tools)
    limit, length = config.data.max_prompt_tokens, prompt_length(config, schemas)
    long = sum(length(task) > limit for task in tasks)
    yield f"prompts of more than data.max_prompt_tokens={limit} tokens: {long:,}"
    chat, tokenizer = load_chat(config)
    if config.agent.gateway is None:
        check_prompts(((f"{path}, row {n}, column prompt", task) for n, task in enumerate(tasks)), lambda: chat)
    token_ids = chat.prompt(tasks[0].prompt, [*schemas.values()])
    token_ids, _ = chat.expand(token_ids, tasks[0].prompt)
    yield f"the first prompt as the policy reads it, {len(token_ids)} tokens:"
    yield str(tokenizer.decode(token_ids))


# At most this many characters of a text are shown.
SHOWN_OF_ANSWER = 80


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
    # Imported here, since it brings Transformers, which takes seconds.
    from rl_async.reward_loop.service import RewardService

    given = list(_read(answers))
    tasks = _tasks_of(_source(config, data), config.seed, [row for row, _ in given])
    scored = []
    async with RewardService(config.reward, sandbox=config.sandbox) as service:
        for (row, answer), task in zip(given, tasks, strict=True):
            trajectory = answered(task, answer)
            await service.score(task, trajectory)
            scored.append(Scored(row, task, trajectory))
    return scored


def report(config: RunConfig, scored: Sequence[Scored]) -> list[str]:
    """Return lines for each answer, with its reward, its parts and the steps of extractions, and the mean reward."""
    # See score_answers.
    from rl_async.reward_loop.service import as_conversation, seen_by

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
            lines += [f"    reason: {_short(reason[:SHOWN_OF_ANSWER])}"] if reason else []
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


def _tasks_of(source: DataSource, seed: int, numbers: Sequence[int]) -> list[Task]:
    rows = open_rows(source.path, seed=seed, parameters=source.parameters)
    tasks = []
    for number in numbers:
        if not 0 <= number < len(rows):
            raise DataError(f"--answers: {source.path} has no row {number}; it has {len(rows)}, counted from 0")
        place = f"{source.path}, row {number}"
        tasks.append(to_task(templated(rows[number], source, place), place, f"{number}", folder_of(source.path)))
    return tasks


def _short(text: str) -> str:
    """Quote a text, keeping only the end of a long one, where answers tend to be."""
    return json.dumps(text if len(text) <= SHOWN_OF_ANSWER else f"...{text[-SHOWN_OF_ANSWER:]}", ensure_ascii=False)
