"""The kinds of engines of a run, and their traits."""

from collections.abc import Mapping
from importlib.util import find_spec

from rl_async.configs.engines import ENGINES, EngineKind
from rl_async.configs.engines.traits import EngineTraits
from rl_async.configs.schema.run import RunConfig


def engine_kinds(config: RunConfig) -> tuple[EngineKind, ...]:
    """Return the kind of each engine process: ``rollout.engine`` for all of them, or its list."""
    kinds = config.rollout.engine
    return (kinds,) * config.rollout.engines if isinstance(kinds, str) else kinds


def lent_engines(config: RunConfig) -> int:
    """Return how many engines run on devices that the trainer lends: as many as its devices suffice for."""
    lends = config.trainer.lend_devices and not config.rollout.replay
    return config.trainer.ranks // config.rollout.ranks if lends else 0


def engine_traits(config: RunConfig) -> Mapping[str, EngineTraits]:
    """Return the traits of the kinds that the run starts, by kind."""
    return {kind: traits for kind, traits in ENGINES.items() if kind in engine_kinds(config)}


def follows_json_schemas(config: RunConfig) -> bool:
    """Whether every engine that the run starts can keep answers to a JSON schema, with what is installed here."""
    packages = [(traits.json_schemas, traits.json_package) for traits in engine_traits(config).values()]
    return all(able and (not package or find_spec(package) is not None) for able, package in packages)
