"""Which kind of engine each engine process of a run is."""

from rl_async.configs.schema.rollout import EngineKind
from rl_async.configs.schema.run import RunConfig


def engine_kinds(config: RunConfig) -> tuple[EngineKind, ...]:
    """One kind per engine process: ``rollout.engine`` for all of them, or its list."""
    kinds = config.rollout.engine
    return (kinds,) * config.rollout.engines if isinstance(kinds, str) else kinds
