"""Rules for the section `data`: schedules that mean something, and a single path where one file is written."""

from rl_async.configs.checks.reward import chain_problem
from rl_async.configs.derived.data import GENERATED_PREFIX, eval_parts, labels, parts, points_of, weight_at
from rl_async.configs.schema.data import DataConfig
from rl_async.configs.schema.run import RunConfig


def curriculum(c: RunConfig) -> str | None:
    sources = parts(c.data)
    for name, source in zip(labels(c.data), sources, strict=True):
        steps = [step for step, _ in source.schedule]
        if steps != sorted(set(steps)):
            return f"data.path: the schedule of {name} must have increasing steps, not {steps}"
        if steps and source.weight != 1.0:
            return f"data.path: {name} has a schedule, so its weight={source.weight:g} has no effect; leave it out"
        if steps and len(sources) == 1:
            return f"data.path: the schedule of {name} has no effect, since there is no other data set"
    # Between these steps interpolation cannot give 0.
    for step in sorted({step for source in sources for step, _ in points_of(source)}):
        if not any(weight_at(points_of(source), step) for source in sources):
            return f"data.path: at step {step} every data set has weight 0; give one a positive weight"
    return None


def make(c: RunConfig) -> str | None:
    if c.data.make and not isinstance(c.data.path, str):
        return "data.make writes one file, so data.path must be a single path"
    return None


def templates(c: RunConfig) -> str | None:
    for source in (*parts(c.data), *eval_parts(c.data)):
        if source.parameters and not source.path.startswith(GENERATED_PREFIX):
            return f"data: parameters of {source.path} have no effect; they are those of a reasoning_gym data set"
        if problem := chain_problem(source.ground_truth_extract):
            return f"data: ground_truth_extract of {source.path}: {problem}"
    if any(source.schedule for source in eval_parts(c.data)):
        return "data.eval_path: a schedule has no effect on held-out tasks; give a weight"
    return None


def no_room(c: RunConfig) -> str | None:
    """Say that prompts pass ``data.max_prompt_tokens`` whose samples will fail; None at its default, and if none do.

    Only what to expect, and no rule: there need not be such prompts.
    """
    longest, limit = c.data.max_prompt_tokens, c.agent.max_tokens
    if c.rollout.replay or longest < limit or longest == DataConfig(path="").max_prompt_tokens:
        return None
    return (
        f"data.max_prompt_tokens={longest}: a prompt of {limit} tokens or more leaves no room to answer within "
        f"agent.max_tokens={limit}, and its samples fail; lower the former, or raise the latter"
    )


DATA_RULES = (curriculum, make, templates)
