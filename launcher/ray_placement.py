"""Groups the processes of a plan into Ray's placement groups, by the resources that each needs. Pure functions."""

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import UserError
from rl_async.launcher.plan.planning import GATEWAY, Plan, ProcessSpec

KEY_HOLDERS = ("queue", "shard", "worker", "trainer")
TOKEN_HOLDERS = ("engine", "reward-model", "worker", "trainer")
COMPUTES = ("engine", "trainer", "reward-model")
# The share of a processor for a process that mostly waits.
SMALL_CPUS = 0.25
Strategy = Literal["PACK", "STRICT_PACK", "SPREAD"]


@dataclass(frozen=True)
class ProcessResources:
    """The share of its bundle that one process takes."""

    name: str
    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True)
class Bundle:
    """Processes on one node: those that share GPUs, or a single one.

    ``memory`` is in bytes; ``home`` stands for the launcher's node.
    """

    processes: tuple[ProcessResources, ...]
    memory: int = 0
    home: bool = False

    @property
    def resources(self) -> dict[str, float]:
        """The resources of the whole bundle, under Ray's names."""
        gpus = sum(resources.gpus for resources in self.processes)
        wanted = {
            "CPU": sum(resources.cpus for resources in self.processes),
            "GPU": float(round(gpus)),
            "memory": float(self.memory),
        }
        return {name: amount for name, amount in wanted.items() if amount}


@dataclass(frozen=True)
class NodeGroup:
    """A placement group: bundles with a common strategy."""

    name: str
    strategy: Strategy
    bundles: tuple[Bundle, ...]


def groups(plan: Plan, threads: int, *, shared: bool) -> tuple[NodeGroup, ...]:
    """Return the placement groups of a run, none of them empty. Processes that compute on a CPU have ``threads``.

    The queue stays on the launcher's node, beside its journal and at a fixed address; so does a gateway. Trainer ranks
    are packed together, and stay there too unless the run folder, which they write, is ``shared`` by all nodes. Engines
    and workers are spread, so that the death of a node spares some. Engines that take weights from the memory of a
    machine are placed with the trainers.
    """
    bundles = _bundles(plan, threads, shared)
    with_trainers = {spec.name for spec in plan.processes if _trains(plan, spec)}
    with_trainer = [
        bundle for bundle in bundles if any(resources.name in with_trainers for resources in bundle.processes)
    ]
    packed: Strategy = "STRICT_PACK" if plan.transport == "ipc" else "PACK"
    kinds: tuple[tuple[str, Strategy, list[Bundle]], ...] = (
        ("home", "PACK", [bundle for bundle in bundles if bundle.home]),
        ("trainers", packed, [bundle for bundle in with_trainer if not bundle.home]),
        ("others", "SPREAD", [bundle for bundle in bundles if not bundle.home and bundle not in with_trainer]),
    )
    return tuple(NodeGroup(name, strategy, tuple(members)) for name, strategy, members in kinds if members)


def _bundles(plan: Plan, threads: int, shared: bool) -> list[Bundle]:
    together: list[list[ProcessSpec]] = []
    for spec in plan.processes:
        sharers = [specs for specs in together if any(set(spec.gpus) & set(other.gpus) for other in specs)]
        together = [specs for specs in together if specs not in sharers]
        together.append([*(other for specs in sharers for other in specs), spec])
    return [_bundle(plan, specs, threads, shared) for specs in together]


def _trains(plan: Plan, spec: ProcessSpec) -> bool:
    """Whether a process must be placed with the trainers."""
    return spec.role == "trainer" or (plan.transport == "ipc" and spec.role == "engine")


def _bundle(plan: Plan, specs: Sequence[ProcessSpec], threads: int, shared: bool) -> Bundle:
    sharers = Counter(gpu for spec in specs for gpu in spec.gpus)
    for spec in specs:
        if len(spec.gpus) > 1 and any(sharers[gpu] > 1 for gpu in spec.gpus):
            raise UserError(
                f"{spec.name} shares its {len(spec.gpus)} GPUs with others, and Ray gives whole GPUs to processes that "
                "have several; use the local launcher, engines of one rank (rollout.tensor_parallel), or more GPUs"
            )
    processes = tuple(
        # Ray counts resources in ten thousandths.
        ProcessResources(spec.name, _cpus(spec, threads), int(sum(10_000 / sharers[gpu] for gpu in spec.gpus)) / 10_000)
        for spec in specs
    )
    memory = sum(spec.memory_bytes or 0 for spec in specs)
    return Bundle(
        processes, memory, any(stays_on_launcher_node(spec) or (_trains(plan, spec) and not shared) for spec in specs)
    )


def stays_on_launcher_node(spec: ProcessSpec) -> bool:
    """Whether a process must keep its address for the whole run, and so run on the launcher's node."""
    return spec.role == "queue" or spec.name == GATEWAY


def _cpus(spec: ProcessSpec, threads: int) -> float:
    if spec.role not in COMPUTES:
        return SMALL_CPUS
    return float(spec.ranks if spec.gpus else spec.ranks * threads)


def check_sharing(config: RunConfig, plan: Plan, without_folder: Sequence[str]) -> None:
    """Raise UserError if the run needs a run folder that all nodes share, and some are ``without_folder``."""
    if without_folder and plan.transport == "disk" and not config.weight_sync.folder:
        raise UserError(
            f"weight_sync.transport=disk: {', '.join(without_folder)} does not see the run folder, where weights are "
            "written; set weight_sync.folder to a folder that all nodes share, or use weight_sync.transport=gloo"
        )


def folders_of(config: RunConfig, plan: Plan, spec: ProcessSpec) -> list[tuple[str, str]]:
    """Return pairs of config key and path for the folders that the node of a process must have."""
    if spec.role in ("queue", "shard"):
        needed = []
    elif spec.role == "reward-model":
        needed = [("reward.model.path", config.reward.model.path)] if config.reward.model is not None else []
    else:
        needed = [("model.path", config.model.path)]
    if plan.transport == "disk" and config.weight_sync.folder and spec.role in ("engine", "trainer"):
        needed.append(("weight_sync.folder", config.weight_sync.folder))
    if spec.role == "trainer":
        algorithm, critic = config.algorithm, config.critic
        paths = {
            "algorithm.kl.reference_path": algorithm.kl.reference_path,
            **(algorithm.teacher.paths if algorithm.teacher else {}),
            "critic.path": critic.path if critic else None,
        }
        needed += [(key, path) for key, path in paths.items() if path]
    if config.queue.keys and spec.role in KEY_HOLDERS:
        needed.append(("queue.keys", config.queue.keys))
    return needed


def interface_of(address: str, interfaces: Mapping[str, Iterable[tuple[str, str | None]]]) -> str:
    """Return the name of the interface with an IPv4 address, or an empty string.

    ``interfaces`` maps names to addresses and netmasks.
    """
    wanted = ipaddress.ip_address(address)
    near = ""
    for name, addresses in interfaces.items():
        for own, mask in addresses:
            if own == address:
                return name
            if mask and wanted in ipaddress.ip_network(f"{own}/{mask}", strict=False):
                # The loopback interface also answers at addresses that it does not list, such as 127.0.0.2.
                near = near or name
    return near
