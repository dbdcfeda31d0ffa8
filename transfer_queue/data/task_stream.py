"""The endless stream of tasks, with a cursor from which it continues after a restart."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rl_async.configs.derived.code import ListedCode, code_problem, listed_code
from rl_async.configs.derived.data import GENERATED_PREFIX, eval_parts, label_of, labels, parts, points_of, shares_at
from rl_async.configs.schema.data import DataSource
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import DataError
from rl_async.messages import Task
from rl_async.transfer_queue.data.dataset import Rows, open_first_rows, open_rows, to_task
from rl_async.transfer_queue.data.prompt_lengths import PromptLength, Schemas, prompt_length
from rl_async.transfer_queue.data.templates import templated
from rl_async.undecodable import UNDECODABLE

NO_SCHEMAS: Schemas = {}
FIRST_ROWS = 8  # of each file, that are read before a run starts


class _Cursor(msgspec.Struct, array_like=True):
    drawn: list[int]  # tasks taken from each source
    rows: list[int]  # rows of each source, to notice that the data has changed
    owed: list[float] = []  # tasks by which each source is behind its share; empty: none is


class _Source:
    """One data set, which has another order in each epoch if it is shuffled."""

    def __init__(self, rows: Rows, part: DataSource, label: str, seed: int | None, listed: ListedCode | None) -> None:
        self.rows, self.label, self.weights = rows, label, points_of(part)
        self._part, self._listed = part, listed
        self._seed = seed  # None: in the file's order
        self._epoch, self._order = -1, list[int]()

    def task(self, drawn: int) -> Task:
        """Return task number ``drawn``, counted from the beginning of the first epoch."""
        epoch, position = divmod(drawn, len(self.rows))
        number = position
        if self._seed is not None and not self.rows.generated:  # generated rows are random already
            if epoch != self._epoch:
                self._epoch, self._order = epoch, list(range(len(self.rows)))
                random.Random(f"{self._seed} {self.label} {epoch}").shuffle(self._order)
            number = self._order[position]
        return self.at(number)

    def at(self, number: int) -> Task:
        """Return the task of the row with this number."""
        task = self._task(self.rows[number], number, f"{self.label}:{number}")
        return msgspec.structs.replace(task, source=self.label)

    def _task(self, row: dict[str, Any], number: int, task_id: str) -> Task:
        """Convert a row. Raises DataError naming it if it is bad or names code that the config does not list."""
        place = f"{self.rows.name}, row {number}"
        task = to_task(templated(row, self._part, place), place, task_id)
        if problem := code_problem(task, self._listed):
            raise DataError(f"{place}, column {problem}")
        return task

    def check(self, length: PromptLength, longest: int) -> None:
        """Raise DataError for the first row that is not a task, or whose prompt has more than ``longest`` tokens."""
        if self.rows.generated:
            return
        for number, row in enumerate(self.rows):
            place, task = f"{self.rows.name}, row {number}, column prompt", self._task(row, number, "")
            try:
                tokens = length(task)
            except DataError as error:
                raise DataError(f"{place}: {error}") from error
            if tokens > longest:
                raise DataError(
                    f"{place}: {tokens} tokens with the template's own text and the tools, more than "
                    f"data.max_prompt_tokens={longest}"
                )


class TaskStream:
    """Endless tasks from several data sets in proportion to their weights. Implements the queue's Protocol.

    The order depends only on the data, the weights, the seed and the steps that were asked for, so a cursor is how much
    was taken of each, and by how much each is behind: weights may change from step to step.
    """

    def __init__(self, sources: Sequence[_Source]) -> None:
        self._sources = sources
        self._drawn = [0] * len(sources)
        self._owed = [0.0] * len(sources)

    def next(self, step: int = 0) -> Task:
        """Return the next task, trained at about ``step``, from the data set that is furthest behind its share.

        One whose share is 0 gives none.
        """
        shares = shares_at([source.weights for source in self._sources], step)
        self._owed = [owed + share for owed, share in zip(self._owed, shares)]
        chosen = max((n for n, share in enumerate(shares) if share), key=self._owed.__getitem__)
        task = self._sources[chosen].task(self._drawn[chosen])
        self._drawn[chosen] += 1
        self._owed[chosen] -= 1.0
        return task

    def cursor(self) -> bytes:
        """Return the position after the last task taken, opaque to the queue."""
        return msgspec.msgpack.encode(_Cursor(self._drawn, [len(s.rows) for s in self._sources], self._owed))

    def seek(self, cursor: bytes) -> None:
        """Continue from a cursor. Raises DataError if it was taken from other data sets."""
        try:
            found = msgspec.msgpack.decode(cursor, type=_Cursor)
        except UNDECODABLE as error:
            raise DataError(f"not a cursor of a task stream: {error}") from error
        rows = [len(source.rows) for source in self._sources]
        if found.rows != rows or len(found.drawn) != len(rows):
            raise DataError(
                f"data.path has changed: the cursor is for data sets of {found.rows} rows, these have {rows}"
            )
        self._drawn, self._owed = list(found.drawn), list(found.owed) or [0.0] * len(rows)


def find_task(config: RunConfig, task_id: str, partition: str) -> Task:
    """Return the task that has this id in the data of ``partition``. Raises DataError if there is none any more."""
    sources = _held_out_sources(config, listed_code(config)) if partition == "eval" else _training_sources(config)
    label, _, number = task_id.rpartition(":")
    for source in sources:
        if source.label == label and number.isdigit() and int(number) < len(source.rows):
            return source.at(int(number))
    key = "data.eval_path" if partition == "eval" else "data.path"
    raise DataError(f"{key} has no task {task_id}; was it made by another data set, or submitted by a client?")


def make_sources(config: RunConfig, schemas: Schemas = NO_SCHEMAS) -> tuple[TaskStream, list[Task]]:
    """Return the training tasks, and the held-out tasks of one evaluation.

    All rows are read once, so that a bad one stops the run before it starts; ``schemas`` are those of the tools that
    they may name. Raises DataError naming it.
    """
    data = config.data
    length = prompt_length(config, schemas)
    sources, held_out_sources = _training_sources(config), _held_out_sources(config, listed_code(config))
    for source in (*held_out_sources, *sources):
        source.check(length, data.max_prompt_tokens)
    return TaskStream(sources), _held_out(held_out_sources, config.eval.tasks)


def check_first_rows(config: RunConfig) -> None:
    """Raise DataError, naming the key, for a file that ``make_sources`` would refuse because of its first rows.

    Reads no others, so that it is quick, and leaves out generated data sets.
    """
    listed = listed_code(config)
    for key, found in (("data.path", parts(config.data)), ("data.eval_path", eval_parts(config.data))):
        for part in found:
            if part.path.startswith(GENERATED_PREFIX):
                continue
            try:
                for rows in open_first_rows(part.path, FIRST_ROWS):
                    source = _Source(rows, part, "", None, listed)
                    for number in range(len(rows)):
                        source.at(number)
            except DataError as error:
                raise DataError(f"{key}: {error}") from error


def first_task(config: RunConfig) -> Task:
    """Return a task of ``data.path``, to try an environment with. Raises DataError."""
    part, label = parts(config.data)[0], labels(config.data)[0]
    if part.path.startswith(GENERATED_PREFIX):
        rows = open_rows(part.path, seed=config.seed, parameters=part.parameters)
    else:
        rows = open_first_rows(part.path, FIRST_ROWS)[0]
    return _Source(rows, part, label, None, listed_code(config)).at(0)


def held_out_tasks(config: RunConfig) -> list[Task]:
    """Return the held-out tasks of one evaluation, however long they are. Raises DataError for a bad row."""
    return _held_out(_held_out_sources(config, listed_code(config)), config.eval.tasks)


def _training_sources(config: RunConfig) -> list[_Source]:
    data, listed = config.data, listed_code(config)
    sources = []
    for part, label in zip(parts(data), labels(data), strict=True):
        rows = open_rows(part.path, seed=config.seed, parameters=part.parameters)
        sources.append(_Source(rows, part, label, config.seed if data.shuffle else None, listed))
    return sources


def _held_out_sources(config: RunConfig, listed: ListedCode | None) -> list[_Source]:
    """Open the held-out data sets, with another seed than training's: a generated set would hold out what is trained.

    A single one is named after its file alone.
    """
    found = eval_parts(config.data)
    return [
        _Source(
            open_rows(part.path, seed=config.seed + 1_000_003, parameters=part.parameters),
            part,
            label_of(part.path) if len(found) == 1 else f"{number}-{label_of(part.path)}",
            None,
            listed,
        )
        for number, part in enumerate(found)
    ]


def _held_out(sources: Sequence[_Source], tasks: int) -> list[Task]:
    """Take the first tasks of each data set, in proportion to the weights; fewer where it has fewer rows."""
    shares = shares_at([source.weights for source in sources], 0)
    return [
        source.at(number)
        for source, share in zip(sources, shares, strict=True)
        for number in range(min(max(1, round(tasks * share)), len(source.rows)))
    ]


def inspect(path: str, *, show: int = 2) -> str:
    """Describe a data set in a few lines of text. Raises DataError for the first bad row."""
    rows = open_rows(path)
    total = min(len(rows), 1000) if rows.generated else len(rows)
    tasks = [to_task(rows[n], f"{path}, row {n}", f"{label_of(path)}:{n}") for n in range(total)]
    lengths = sorted(sum(len(message["content"]) for message in task.prompt) for task in tasks)
    different = len({msgspec.json.encode(task.prompt) for task in tasks})
    lines = [
        f"{path}: {'generated; the first ' if rows.generated else ''}{total} rows, {different} different prompts",
        f"prompt characters: shortest {lengths[0]}, median {lengths[total // 2]}, longest {lengths[-1]}",
        f"data_source: {_counts(task.data_source for task in tasks)}",
        f"agent_name: {_counts(task.agent or '(the config decides)' for task in tasks)}",
    ]
    for task in tasks[:show]:
        lines.append(f"--- {task.task_id}")
        lines += [f"{message['role']}: {message['content']}" for message in task.prompt]
        lines.append(f"ground_truth: {task.ground_truth}")
    return "\n".join(lines)


def _counts(values: Iterable[str]) -> str:
    return ", ".join(f"{value} {count}" for value, count in Counter(values).most_common(10))
