"""Rules for the section `reward`: scorers that ask a server have one, with a URL that holds no secret."""

import re

import regex

from rl_async.configs.schema.run import RunConfig
from rl_async.extraction import REGEX, RULES, Extraction, compiled
from rl_async.userload import is_user_reference


def unrewarded(c: RunConfig) -> str | None:
    """Say that nothing can teach a new run: no scorers, agent programs or record, nor what rewards single turns.

    Loops, tools and estimators that are the user's own, and environments, may do that, or need no reward; a reference
    model and a penalty for length teach without one. An evaluation needs none either, so this is no rule.
    """
    elsewhere = c.finetune or c.rollout.replay or c.agent.gateway or c.agent.environment or c.data.trust_code
    shaped = c.algorithm.kl.coef > 0 or c.algorithm.shaping.overlong_max_tokens is not None
    named = (c.agent.loop, *c.agent.tools, c.algorithm.advantage, c.algorithm.loss)
    if c.reward.functions or elsewhere or shaped or any(map(is_user_reference, named)):
        return None
    return (
        "reward.functions=[] and nothing else gives rewards, so every episode would be worth 0 and teach nothing; name "
        "a scorer, such as exact_answer, or what rewards turns or episodes itself: agent.environment, agent.gateway, "
        "or an agent.loop or agent.tools of your own"
    )


def servers(c: RunConfig) -> str | None:
    """Require the sections of the scorers that ask a server, and URLs and names of variables without secrets."""
    used = {term.name for term in c.reward.functions}
    if "reward_model" in used and c.reward.model is None:
        return "reward.functions: reward_model needs reward.model.path, the folder of a sequence classifier"
    if "judge" in used and c.reward.judge is None:
        return "reward.functions: judge needs reward.judge.url and reward.judge.model"
    if "environment" in used and c.agent.environment is None:
        return "reward.functions: environment is the reward that agent.environment gives; name that, or another scorer"
    model, judge, user = c.reward.model, c.reward.judge, c.agent.user
    if (c.agent.environment == "simulated_user") != (user is not None):
        return "agent.environment=simulated_user and agent.user, with the user's role in system, need one another"
    if user is not None and bool(user.url) != bool(user.model):
        return "agent.user.url and agent.user.model name a server and its model; leave both out for the policy itself"
    if user is not None and user.highest <= user.lowest:
        return f"agent.user.highest={user.highest:g} must be above agent.user.lowest={user.lowest:g}"
    opponents = [(f"agent.opponents.{role}", opponent) for role, opponent in c.agent.opponents.items()]
    if opponents and c.agent.environment is None:
        return "agent.opponents play roles of agent.environment; name one, or leave them out"
    for section, opponent in opponents:
        if bool(opponent.url) != bool(opponent.model):
            return (
                f"{section}.url and {section}.model name a server and its model; leave both out for the policy itself"
            )
    of_users = (("agent.user", user), *opponents, ("eval.endpoint", c.eval.endpoint))
    sections = (("reward.model", model), ("reward.judge", judge), *of_users)
    urls = {f"{name}.url": section.url for name, section in sections if section is not None}
    for key, url in urls.items():
        if url and not re.fullmatch(r"https?://[^\s@?#]+", url):
            return f"{key} must be http://... or https://..., without a password and without a query"
    names = {name: section.api_key_env for name, section in sections if section is not None}
    for section, name in names.items():
        if name and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
            return f"{section}.api_key_env is the NAME of an environment variable (capitals), never the key itself"
    return None


def judge(c: RunConfig) -> str | None:
    judge = c.reward.judge
    if judge is None:
        return None
    if "{response}" not in judge.template and "{conversation}" not in judge.template:
        return "reward.judge.template must contain {response} or {conversation}, else the judge sees nothing to grade"
    if judge.highest <= judge.lowest:
        return f"reward.judge.highest={judge.highest:g} must be above reward.judge.lowest={judge.lowest:g}"
    return None


def extraction(c: RunConfig) -> str | None:
    for term in c.reward.functions:
        if term.extract and term.name == "reward_model":
            return "reward.functions: extract has no effect on reward_model, which reads the conversation; leave it out"
        if problem := chain_problem(term.extract):
            return f"reward.functions: extract of {term.name}: {problem}"
    return None


def chain_problem(chain: Extraction) -> str | None:
    """Say what is wrong with the first rule of a chain that is none; None if all are rules."""
    rules = (name for step in chain for name in ((step,) if isinstance(step, str) else step))
    return next((problem for rule in rules if (problem := _rule_problem(rule))), None)


def _rule_problem(rule: str) -> str | None:
    if rule.startswith(REGEX):
        try:
            compiled(rule)
        except regex.error as error:
            return f"{rule} is not a regular expression: {error}"
        return None
    known = f"{', '.join(RULES)} or {REGEX}PATTERN"
    return None if rule in RULES else f"no rule {rule!r}; write one of {known}"


REWARD_RULES = (servers, judge, extraction)
