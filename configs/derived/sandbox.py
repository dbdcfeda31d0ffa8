"""Whether a run needs a sandbox."""

from rl_async.configs.schema.run import RunConfig

CODE_TOOLS = ("python", "bash")  # the built-in tools that run what a model writes
CODE_SCORER = "code"


def uses_sandbox(config: RunConfig) -> bool:
    """Whether tools or scorers of the config run code; a task may name such tools all the same."""
    by_tools = config.agent.gateway is None and not set(CODE_TOOLS).isdisjoint(config.agent.tools)
    return by_tools or CODE_SCORER in {term.name for term in config.reward.functions}
