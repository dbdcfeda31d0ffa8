"""Tries what a run does first with its own code, its reward and its data, in a separate process: ``python -m
rl_async.launcher.runs.rehearsal``.

A loss or a reward that raises is found here, before the run has a folder, instead of a minute into the run.

``score_answers`` is ``rl-async reward test``: it scores answers as a run would, and shows the text extracted from each.
``inspect`` is ``rl-async data inspect``: what a data set has, what a run would make of it, and what it lacks.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rl_async.agent_loop.chat_formats.format import ChatFormat, said_text
from rl_async.configs.derived import eval_parts, files_of, label_of, parts, warm_start_of
from rl_async.configs.schema.data import DataSource
from rl_async.configs.schema.reward import RewardTerm
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_USER, ConfigError, DataError, RlAsyncError
from rl_async.extraction import Extraction, trace
from rl_async.files import DAMAGE
from rl_async.launcher.plan.trials import load_own, run_apart, schemas_of
from rl_async.launcher.sources import data_files
from rl_async.messages import Sampling, Task, Trajectory, Turn
from rl_async.reward_loop.service import RewardService, as_conversation, seen_by
from rl_async.transfer_queue.chat_messages import prompt_length
from rl_async.transfer_queue.dataset import Rows, open_rows, templated, to_task
from rl_async.transfer_queue.images import folder_of, images_of, shown
from rl_async.userload import is_user_reference

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
    return json.dumps(text if len(text) <= SHOWN_OF_ANSWER else f"...{text[-SHOWN_OF_ANSWER:]}", ensure_ascii=False)


# Importing torch and Transformers from a slow disk takes a minute each, and all rows are read once.
SLACK_S = 300.0
# Characters of a prompt.
SHOWN = 800


class Findings(msgspec.Struct):
    """Pairs of a label and a text for ``--dry-run``, and warnings."""

    lines: list[tuple[str, str]] = msgspec.field(default_factory=list)
    warnings: list[str] = msgspec.field(default_factory=list)


class _Trial(msgspec.Struct):
    """The input of the process."""

    config: RunConfig
    whole: bool


def rehearse(config: RunConfig, *, whole: bool) -> Findings:
    """Try what the user's config brings of their own before anything starts.

    These are loss, advantage, correction and reward functions, a teacher's tokenizer and the layers of adapters. With
    ``whole`` also load the user's other code, read all rows, try the built-in rewards that need no server, and
    render the first prompt.
    Raises ConfigError naming the key, or the row, that the run could not use.
    """
    taught_by = config.algorithm.teacher
    teacher = taught_by is not None and (bool(taught_by.paths) or taught_by.hint is not None)
    if not (whole or teacher or _own_algorithm(config) or any(_own_terms(config)) or _lora_targets(config)):
        return Findings()
    limit_s = SLACK_S + 2 * config.reward.timeout_s
    what = "trying the algorithm, the reward and the data"
    given = msgspec.json.encode(_Trial(config, whole))
    printed = run_apart("launcher.runs.rehearsal", what=what, limit_s=limit_s, given=given)
    # The user's code may have printed something before.
    return msgspec.json.decode(printed.splitlines()[-1], type=Findings)


def main() -> int:
    """Rehearse the run on standard input; print the findings, or an error as the last line of standard error."""
    trial = msgspec.json.decode(sys.stdin.buffer.read(), type=_Trial)
    try:
        findings = rehearse_here(trial.config, trial.whole)
    except RlAsyncError as error:
        print(" ".join(str(error).splitlines()), file=sys.stderr)
        return EXIT_USER
    print(msgspec.json.encode(findings).decode())
    return 0


def _lora_targets(config: RunConfig) -> tuple[str, ...]:
    """Return the configured names of layers that get adapters; the default is empty, which never fails."""
    return config.trainer.lora.targets if config.trainer.lora is not None else ()


def rehearse_here(config: RunConfig, whole: bool) -> Findings:
    """Do the work of ``rehearse`` in this process, which the user's code may change."""
    findings = Findings()
    if whole:
        load_own(config)
        for schema in schemas_of(_tools(config)).values():
            if not schema["function"]["description"]:
                name = schema["function"]["name"]
                findings.warnings.append(f"agent.tools: {name} has no docstring, which tells the model what it does")
    if _own_algorithm(config):
        # Imported only here, since it imports torch.
        from rl_async.trainer.algorithms.algorithm import build

        build(config)
    if (targets := _lora_targets(config)) and Path(config.model.path).is_dir():
        # Imported only here, since they import torch.
        from rl_async.trainer.lora import chosen
        from rl_async.trainer.model import build_bare

        chosen(build_bare(Path(config.model.path)), targets)
    teacher = config.algorithm.teacher
    if teacher is not None and Path(config.model.path).is_dir():
        from rl_async.trainer.teacher import Hints, check_tokenizers

        # A server may be started with the run.
        check_tokenizers(teacher.paths, {}, config.model.path)
        if teacher.hint is not None:
            Hints(teacher.hint, config.model.path)
    if config.rollout.replay:
        return findings
    # Imported only here, since it imports PyArrow, and the launcher imports this module.
    from rl_async.transfer_queue.dataset import first_task, make_sources, open_rows

    sources = parts(config.data)
    made = config.data.make is not None and not Path(sources[0].path).is_file()
    if whole and not made:
        make_sources(config, schemas_of(_tools(config)))
        rows = sum(len(open_rows(part.path, seed=config.seed, parameters=part.parameters)) for part in sources)
        limit = f"data.max_prompt_tokens={config.data.max_prompt_tokens}"
        findings.lines.append(("data", f"{rows:,} rows, all readable, no prompt longer than {limit}"))
    task = _made_task(config) if made else first_task(config)
    if whole:
        if not made:
            check_printed(config)
        findings.lines += [*_prompt(config, task), *_demonstrations(config)]
    asyncio.run(_try_rewards(config, task, whole, findings))
    return findings


def check_printed(config: RunConfig) -> None:
    """Raise DataError for the first prompt with a part that the model's chat template leaves out.

    A model that is not a folder here cannot be checked, and agent programs render prompts themselves.
    """
    if config.rollout.replay or config.agent.gateway is not None or not Path(config.model.path).is_dir():
        return
    # Imported only here, since they import Transformers, which takes seconds, and PyArrow.
    from rl_async.agent_loop.chat_formats.render import check_prompts
    from rl_async.transfer_queue.dataset import every_task

    def load() -> ChatFormat:
        from rl_async.agent_loop.chat_formats.format_registry import load_format

        return load_format(config.model.path, config.agent)

    check_prompts(every_task(config), load)


def _own_algorithm(config: RunConfig) -> bool:
    algorithm = config.algorithm
    return any(map(is_user_reference, (algorithm.advantage, algorithm.loss, algorithm.correction)))


def _own_terms(config: RunConfig) -> Iterator[RewardTerm]:
    return (term for term in config.reward.functions if is_user_reference(term.name))


def _made_task(config: RunConfig) -> Task:
    """Return a task like those that ``data.make`` will write."""
    from rl_async.agent_loop.toy_tasks import sample_row
    from rl_async.transfer_queue.dataset import templated, to_task

    assert config.data.make is not None
    part, place = parts(config.data)[0], f"data.make={config.data.make}"
    return to_task(templated(sample_row(config.data.make), part, place), place, "first")


def _tools(config: RunConfig) -> tuple[str, ...]:
    """Return the tools whose schemas are in prompts; with a gateway, programs offer their own."""
    return () if config.agent.gateway is not None else config.agent.tools


def load_chat(config: RunConfig) -> tuple[ChatFormat, Any]:
    """Load the chat format of the policy, and its tokenizer, which decodes tokens with the special ones among them."""
    # Imported only here, since they take seconds.
    from transformers import PreTrainedTokenizerFast

    from rl_async.agent_loop.chat_formats.format_registry import load_format

    return load_format(config.model.path, config.agent), PreTrainedTokenizerFast.from_pretrained(config.model.path)


def _prompt(config: RunConfig, task: Task) -> Iterator[tuple[str, str]]:
    """Yield the first prompt as the policy gets it, and the tokens at which an answer ends."""
    if config.agent.gateway is not None or not Path(config.model.path).is_dir():
        return
    chat, tokenizer = load_chat(config)
    token_ids = chat.prompt(task.prompt, list(schemas_of(_tools(config)).values()))
    text = tokenizer.decode(token_ids)
    cut = f"\n... {len(text) - SHOWN} more characters" if len(text) > SHOWN else ""
    tools = ", and tools of the environment or of MCP servers" if config.agent.environment or config.agent.mcp else ""
    whole, images = chat.expand(token_ids, task.prompt)
    shown = f", {len(whole) - len(token_ids) + len(images)} of them of images" if images else ""
    yield "prompt", f"{len(whole)} tokens{shown}{tools}:\n{text[:SHOWN]}{cut}"
    yield "answers end", f"at {', '.join(map(tokenizer.decode, chat.stop_token_ids))}"


def _demonstrations(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the number of demonstrations of a warm start that is still to be done, if they are here.

    Raises DataError naming the key for the first that cannot be learned.
    """
    makes = warm_start_of(config)
    if makes is None or Path(config.model.path).exists():
        return
    if not all(file.is_file() for file in files_of(makes.demos_path)):
        return
    # Imported only here, since they import PyArrow and Transformers.
    from rl_async.agent_loop.tiny_tokenizer import read_demos
    from rl_async.agent_loop.training_data import read_chats

    try:
        if makes.pretrained is None:
            count = len(read_demos(makes.demos_path))
        else:
            count = sum(1 for _ in read_chats(DataSource(path=makes.demos_path)))
    except DataError as error:
        raise DataError(f"warm_start.demos_path: {error}") from error
    yield "warm start", f"{count:,} demonstrations, all readable"


async def _try_rewards(config: RunConfig, task: Task, whole: bool, findings: Findings) -> None:
    """Score the ground truth and nothing as answers. Raises ConfigError if neither can be scored."""
    from rl_async.reward_loop.scorers.scorer_registry import SERVED
    from rl_async.reward_loop.service import RewardService

    # An environment's reward belongs to an episode that was played.
    untried = {*SERVED, "environment"}
    terms = [term for term in config.reward.functions if term.name not in untried] if whole else [*_own_terms(config)]
    for term in terms:
        alone = msgspec.structs.replace(config.reward, functions=(term,), model=None, judge=None)
        given = {"the ground truth": task.ground_truth, "an empty answer": ""}
        scored = {name: answered(task, answer) for name, answer in given.items()}
        async with RewardService(alone, sandbox=config.sandbox) as service:
            for trajectory in scored.values():
                await service.score(task, trajectory)
        failed = {name: trajectory.error for name, trajectory in scored.items() if not trajectory.scored}
        if len(failed) == len(scored):
            raise ConfigError(
                f"reward.functions: {failed['an empty answer'].removeprefix('reward ')}; it can score neither an empty "
                f"answer nor the ground truth of {task.task_id} as one, and an answer without a reward trains nothing"
            )
        findings.warnings += [f"reward.functions: {error} (of {name})" for name, error in failed.items()]
        values = [f"{scored[name].reward:g} for {name}" for name in scored.keys() - failed.keys()]
        findings.lines.append(("reward", f"{term.name}: {', '.join(sorted(values, reverse=True))}"))


# Rows of a generated data set that are read, examples of tasks, and characters of a value that are shown.
GENERATED = 1000
EXAMPLES = 2
SHOWN_OF_EXAMPLE = 60
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
    tasks = list(_tasks_of(rows, part, count))
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
        example = " ".join(self.first[: SHOWN_OF_EXAMPLE + 1].split())
        example = example if len(example) <= SHOWN_OF_EXAMPLE else f"{example[: SHOWN_OF_EXAMPLE - 3]}..."
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


def _tasks_of(rows: Rows, part: DataSource, count: int) -> Iterator[Task]:
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


if __name__ == "__main__":
    sys.exit(main())
