"""Tries what a run does first with its own code, its reward and its data, in a separate process: ``python -m
rl_async.launcher.runs.rehearsal``.

A loss or a reward that raises is found here, before the run has a folder, instead of a minute into the run.
"""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rl_async.agent_loop.chat_formats.format import ChatFormat, said_text
from rl_async.configs.derived import files_of, parts, warm_start_of
from rl_async.configs.schema.data import DataSource
from rl_async.configs.schema.reward import RewardTerm
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_USER, ConfigError, DataError, RlAsyncError
from rl_async.launcher.plan.trials import load_own, run_apart, schemas_of
from rl_async.messages import Sampling, Task, Trajectory, Turn
from rl_async.userload import is_user_reference

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


if __name__ == "__main__":
    sys.exit(main())
