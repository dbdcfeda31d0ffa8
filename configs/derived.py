"""Values that follow from several keys, as pure functions of the config: which transport `auto` means, who needs a key.

Roles and the launcher call them, so that both derive the same value. Nothing is written back into the config.
"""

import ipaddress
import shlex
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from rl_async.configs.engines import ENGINES, EngineKind, EngineTraits
from rl_async.configs.schema.algorithm import advantage_needs
from rl_async.configs.schema.data import ComputeType, DataConfig, DataSource, ModelConfig, WarmStartConfig
from rl_async.configs.schema.rollout import NODES, McpServerConfig
from rl_async.configs.schema.run import QueueConfig, RedisConfig, RunConfig
from rl_async.configs.schema.trainer import Transport
from rl_async.errors import ConfigError
from rl_async.messages import Task
from rl_async.userload import is_user_reference

GENERATED_PREFIX = "reasoning_gym:"
# Pairs of a step and the weight at it, ordered by step.
Points = tuple[tuple[int, float], ...]


def parts(data: DataConfig) -> tuple[DataSource, ...]:
    """List the data sets of ``data.path``, also if it is a single path."""
    return (DataSource(path=data.path),) if isinstance(data.path, str) else data.path


def eval_parts(data: DataConfig) -> tuple[DataSource, ...]:
    """List the data sets of ``data.eval_path``; empty without held-out tasks."""
    if data.eval_path is None:
        return ()
    return (DataSource(path=data.eval_path),) if isinstance(data.eval_path, str) else data.eval_path


def label_of(path: str) -> str:
    """Return the name in task ids of a data set that is the only one."""
    return path.replace(":", ".") if path.startswith(GENERATED_PREFIX) else Path(path).stem.rstrip("-*")


def files_of(path: str) -> list[Path]:
    """List the files of a data set: a file, whether it exists or not, a folder's, or those that a pattern matches."""
    given = Path(path)
    if given.is_dir():
        kinds = (sorted(given.glob(pattern)) for pattern in ("*.parquet", "*.jsonl", "*.csv"))
        return next(filter(None, kinds), [])
    return sorted(given.parent.glob(given.name)) if "*" in given.name else [given]


def labels(data: DataConfig) -> list[str]:
    """Return a unique name for each data set: ``Task.source`` of its tasks."""
    paths = [part.path for part in parts(data)]
    return [label_of(path) if len(paths) == 1 else f"{n}-{label_of(path)}" for n, path in enumerate(paths)]


def points_of(source: DataSource) -> Points:
    """Return a data set's weights by step: its schedule, or its constant weight."""
    return source.schedule or ((0, source.weight),)


def weight_at(points: Points, step: int) -> float:
    """Interpolate linearly between the points around ``step``; constant before the first and after the last."""
    for (before, low), (after, high) in pairwise(points):
        if before <= step < after:
            return low + (high - low) * (step - before) / (after - before)
    return points[0][1] if step < points[0][0] else points[-1][1]


def shares_at(weights: Sequence[Points], step: int) -> list[float]:
    """Return each data set's share of the tasks at ``step``; they sum to 1."""
    now = [weight_at(points, step) for points in weights]
    total = sum(now)
    return [weight / total for weight in now]


def shares_by_label(weights: Mapping[str, Points], step: int) -> dict[str, float]:
    """Return ``shares_at`` as a mapping from the data sets' names."""
    return dict(zip(weights, shares_at(list(weights.values()), step), strict=True))


def warm_start_of(config: RunConfig) -> WarmStartConfig | None:
    """Return the warm start if it makes ``model.path``; None for a model that must be there already."""
    settings = config.warm_start
    if settings is None or not settings.out or Path(settings.out) != Path(config.model.path):
        return None
    return settings


def compute_type(model: ModelConfig) -> ComputeType:
    """Return ``model.dtype`` for a role. It must be settled: each role would choose by its own machine.

    Raises ConfigError for ``auto``.
    """
    if model.dtype == "auto":
        raise ConfigError(
            "model.dtype=auto: the roles of a run need the type that it was started with; write float32 or bfloat16 "
            "into config.yaml, as `rl-async launch` and `rl-async config show` do"
        )
    return model.dtype


def reference_is_base(config: RunConfig, *, experts: bool) -> bool:
    """Whether the policy without its adapters is the reference, in place of a second model.

    Whole distributions of both are needed within one training pass, and with ``experts`` the policy may replay its
    routers, which a reference does not: then the reference is a model of its own.
    """
    kl, adapters = config.algorithm.kl, config.trainer.lora is not None
    return (
        config.algorithm.uses_reference
        and adapters
        and not kl.reference_path
        and kl.estimator != "full"
        and not experts
    )


def samples_per_group(config: RunConfig) -> int:
    """Return how many trajectories a training group has: ``rollout.group_size``, plus a greedy baseline if needed."""
    return config.rollout.group_size + ("greedy" in advantage_needs(config.algorithm.advantage))


def is_baseline(config: RunConfig, partition: str, sample: int) -> bool:
    """Return whether this sample of a group is the greedy episode, which is never trained on."""
    return partition == "train" and sample >= config.rollout.group_size


def unbounded(values: Mapping[str, float], limit: float) -> str | None:
    """Name the first value that is beyond the limit or not a number, with the key; None if all are within it.

    A value of 1e39 is infinite as a float32 and ends the run; 1e12 drowns the rewards that it is compared with.
    """
    for name, value in values.items():
        if not abs(value) <= limit:
            return f"{name} is {value:g}, which is not from {-limit:g} to {limit:g} (reward.limit)"
    return None


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
    """Whether every engine that the run starts can keep answers to a JSON schema, with the packages installed here."""
    packages = [(traits.json_schemas, traits.json_package) for traits in engine_traits(config).values()]
    return all(able and (not package or find_spec(package) is not None) for able, package in packages)


def resolve_transport(config: RunConfig) -> Transport:
    """Choose ``ipc`` (shared memory) if engines and trainer share devices, else ``nearest``; ``gloo`` if an engine
    lacks that.

    ``nccl`` is not chosen here; ``launcher.plan.machine.with_weight_way`` may choose it between machines.
    """
    if transports := config.weight_sync.transports:
        return transports[0]
    wanted: Transport = "ipc" if config.mode == "colocated" else "nearest"
    return wanted if all(wanted in traits.transports for traits in engine_traits(config).values()) else "gloo"


def sends_shards(config: RunConfig) -> bool:
    """Whether every trainer rank sends its own shards to the engines.

    Otherwise rank 0 gathers whole tensors, which deltas and adapters are made from, and sends them.
    """
    whole = config.weight_sync.delta or adapter_way(config) != "merge"
    return not whole and all(traits.takes_slices for traits in engine_traits(config).values())


def adapter_way(config: RunConfig) -> Literal["load", "add", "merge"]:
    """Return what ``weight_sync.adapters`` means in this run, which is merge without ``trainer.lora``."""
    way = config.weight_sync.adapters
    if config.trainer.lora is None:
        return "merge"
    if way == "auto":
        tried = all(traits.loads_adapters for traits in engine_traits(config).values())
        return "load" if tried and not config.weight_sync.delta and not why_adapters_are_not_loaded(config) else "merge"
    return way


def why_adapters_are_not_loaded(config: RunConfig) -> str:
    """Return why the run's engines cannot compute adapters beside their own weights; empty if they can."""
    rollout, lora = config.rollout, config.trainer.lora
    for traits in engine_traits(config).values():
        if lora is not None and traits.adapter_ranks and lora.rank > traits.adapter_ranks[-1]:
            return f"{traits.title} takes ranks up to {traits.adapter_ranks[-1]}, and trainer.lora.rank={lora.rank}"
        if rollout.nodes > 1 and not traits.takes_slices:
            return f"{traits.title} reads adapters from files of its first node, and there are {NODES} {rollout.nodes}"
    if config.mode == "colocated" or config.trainer.lend_devices:
        return "engines on the trainer's devices drop the base in their sleep"
    if rollout.quantization != "none":
        return f"rollout.quantization={rollout.quantization} rounds the base, whose adapters were not trained for that"
    if rollout.expert_parallel > 1:
        return "it has not been tried with rollout.expert_parallel"
    return ""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``; anything but an IPv4 address counts as reachable."""
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def is_encrypted(queue: QueueConfig) -> bool:
    """Return whether clients come by TCP and CURVE; otherwise by socket files that only this user can open."""
    return queue.curve == "always" or not is_loopback(queue.host)


def key_folder(config: RunConfig, run: Path) -> Path:
    """Return the folder with the run's keys."""
    return Path(config.queue.keys) if config.queue.keys else run / "keys"


def slack(queue: QueueConfig) -> int:
    """Return the steps of the bound that are left to the sampling policy.

    Groups are admitted for max_staleness - slack, so that a batch may pass over a ready one for this many steps.
    """
    return 0 if queue.sampling == "fifo" else 1


class ListedCode(msgspec.Struct, frozen=True):
    """The user code that the config's section `agent` names."""

    loops: tuple[str, ...]
    tools: tuple[str, ...]


def listed_code(config: RunConfig) -> ListedCode | None:
    """Return the user code that tasks may name, or None if they may name any (``data.trust_code``)."""
    if config.data.trust_code:
        return None
    return ListedCode((config.agent.loop,), config.agent.tools)


def code_problem(task: Task, listed: ListedCode | None) -> str | None:
    """Name the task's first reference to code that the config does not list, with the fix, or return None.

    Names of built-in loops and tools load nothing, so they always pass.
    """
    if listed is None:
        return None
    if is_user_reference(task.agent) and task.agent not in listed.loops:
        return _problem("agent_name", task.agent, "agent.loop")
    for name in task.tools or ():
        if is_user_reference(name) and name not in listed.tools:
            return _problem("tools", name, "agent.tools")
    return None


def _problem(column: str, name: str, key: str) -> str:
    return (
        f"{column} names code that the config does not list: {name!r:.200}; name it in {key}, or set "
        "data.trust_code=true if whoever writes tasks may run code as you"
    )


# The built-in tools that run code of the model.
CODE_TOOLS = ("python", "bash")
CODE_SCORER = "code"
# Environments whose user is a language model: the policy, or one that a server has.
MODELLED_USERS = ("simulated_user", "collaborative_user")
# Environments whose names begin so run the model's programs.
HARBOR = "harbor:"


def uses_sandbox(config: RunConfig) -> bool:
    """Whether tools, scorers or environments of the config run code; a task may name such tools all the same."""
    by_tools = config.agent.gateway is None and not set(CODE_TOOLS).isdisjoint(config.agent.tools)
    return by_tools or plays_harbor(config) or CODE_SCORER in {term.name for term in config.reward.functions}


def plays_harbor(config: RunConfig) -> bool:
    """Whether the episodes are tasks of Harbor, which have folders at the root."""
    return config.agent.gateway is None and (config.agent.environment or "").startswith(HARBOR)


# Every command gets these variables of our environment.
PASSED = ("HOME", "LANG", "LOGNAME", "PATH", "TERM", "TMPDIR", "USER")


def argv_of(config: McpServerConfig) -> list[str]:
    """Return the words of the command; none for a server at a URL. Raises ValueError for an open quotation."""
    return shlex.split(config.command) if isinstance(config.command, str) else list(config.command)


def secret_variables(configs: Sequence[McpServerConfig]) -> list[str]:
    """Return the variables of our environment that are meant for servers alone."""
    named = [name for config in configs for name in (*config.env_from, *config.headers_from.values())]
    return [name for name in named if name not in PASSED]


def redis_of(config: RunConfig) -> RedisConfig:
    """Return the settings of the Redis journal, which are the defaults if the section is absent."""
    return config.queue.redis or RedisConfig()
