"""Whether a run needs a sandbox."""

from rl_async.configs.schema.run import RunConfig

CODE_TOOLS = ("python", "bash")  # the built-in tools that run what a model writes
CODE_SCORER = "code"
HARBOR = "harbor:"  # begins the names of environments whose episodes are programs of the model


def uses_sandbox(config: RunConfig) -> bool:
    """Whether tools, scorers or environments of the config run code; a task may name such tools all the same."""
    by_tools = config.agent.gateway is None and not set(CODE_TOOLS).isdisjoint(config.agent.tools)
    return by_tools or plays_harbor(config) or CODE_SCORER in {term.name for term in config.reward.functions}


def plays_harbor(config: RunConfig) -> bool:
    """Whether the episodes are tasks of Harbor, which have folders at the root."""
    return config.agent.gateway is None and (config.agent.environment or "").startswith(HARBOR)
