"""Runs processes on the nodes of a Ray cluster: placement groups, and one keeper actor per process. Ray moves no data.

    Supervisor ──start──> RayNodes ──placement groups──> Ray
        └── RemoteChild <──output, exit code── Keeper (an actor in its bundle) ── the process

The one file that imports Ray; it is imported for ``--launcher ray`` only.
"""

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rl_async.accelerators import select_devices
from rl_async.concurrency import gather_or_cancel, time_limit
from rl_async.configs.derived import is_loopback
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RlAsyncError, UserError
from rl_async.launcher.plan.machine import PROBE_S, Measured, ask_torch
from rl_async.launcher.plan.planning import RENDEZVOUS, Plan, ProcessSpec, meeting_port
from rl_async.launcher.ray_keeper import (
    ANSWER_S,
    KEY_HOLDERS,
    RETRY_S,
    TOKEN_HOLDERS,
    Allocation,
    AllocationRequest,
    Bundle,
    Keeper,
    KeeperGone,
    KeeperSilent,
    NodeGroup,
    ProcessResources,
    RemoteChild,
    Started,
    check_sharing,
    folders_of,
    groups,
    own_addresses,
    sees,
    stays_on_launcher_node,
)
from rl_async.launcher.supervisor import Process, ThisMachine
from rl_async.process.http_auth import token_file

# Ray gives every node this label.
NODE = "ray.io/node-id"
# For its first answer, a node may have to start one of Ray's worker processes.
NODE_ANSWER_S = 60.0
CLOSE_S = 10.0
# This is short, since the other keepers wait while one cleans up.
CLEAN_UP_S = 2.0
START_ATTEMPTS = 5

log = logging.getLogger("rl_async.launcher")
Actor: Any = ray.remote(Keeper)
sees_folder: Any = ray.remote(sees)


class NoRoom(RlAsyncError):
    """The cluster has no room for a process; the message names its needs and the free resources."""


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster, with the id and address of the launcher's node, and the memory of the smallest node in bytes."""

    node_id: str
    address: str
    gpus: int
    host_bytes: int

    def measure(self, device: str, shape: tuple[int, int], threads: int) -> Measured:
        """Call ``ask_torch`` here about the processor, or on a node with a GPU. Raises UserError."""
        if device == "cpu":
            return ask_torch(device, shape, threads)
        asked = ray.remote(ask_torch).options(num_gpus=1).remote(device, shape, threads)
        try:
            return ray.get(asked, timeout=NODE_ANSWER_S + PROBE_S)
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            ray.cancel(asked, force=True)
            raise UserError(
                f"model.dtype=auto: no node with a GPU answered ({_first_line(error)}); set float32 or bfloat16"
            ) from error

    def at_home(self, config: RunConfig) -> RunConfig:
        """Return the config with a ``queue.host`` that other nodes can reach, even after the launcher has moved."""
        if config.queue.host in own_addresses() and not is_loopback(config.queue.host):
            return config
        return msgspec.structs.replace(config, queue=msgspec.structs.replace(config.queue, host=self.address))


@contextmanager
def connected(address: str) -> Iterator[Cluster]:
    """Connect to the cluster at ``address``, by default that of RAY_ADDRESS or of this machine. Raises UserError."""
    if address.startswith("ray://"):
        raise UserError(
            f"--address {address}: start the launcher on a node of the cluster, where the run folder will be"
        )
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"--launcher ray: no Ray cluster answers ({_first_line(error)}); run `ray start --head` "
            "here and `ray start --address=HOST:PORT` on the other nodes, or give --address. A cluster with token "
            "authentication wants the token that `ray get-auth-token` prints on its head, here in ~/.ray/auth_token "
            "or in RAY_AUTH_TOKEN"
        ) from error
    try:
        yield Cluster(
            ray.get_runtime_context().get_node_id(),
            ray.util.get_node_ip_address(),
            int(ray.cluster_resources().get("GPU", 0)),
            min(int(node["Resources"].get("memory", 0)) for node in ray.nodes() if node["Alive"]),
        )
    finally:
        ray.shutdown()


class ActorClient:
    """Calls the methods of a keeper that is a Ray actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def ask(self, method: str, *arguments: Any, timeout_s: float = ANSWER_S) -> Any:
        """Implement ``KeeperClient.ask``."""
        try:
            async with time_limit(timeout_s):
                return await getattr(self._actor, method).remote(*arguments)
        except TimeoutError:
            raise KeeperSilent(f"no answer to {method} within {timeout_s:g} s") from None
        except ActorUnavailableError as error:
            raise KeeperSilent(_first_line(error)) from error
        except RayActorError as error:
            raise KeeperGone(_first_line(error)) from error
        except RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise

    def tell(self, method: str) -> None:
        """Implement ``KeeperClient.tell``."""
        getattr(self._actor, method).remote()

    def drop(self) -> Any:
        """Have the keeper clean up; return a reference that is ready once it has."""
        return self._actor.close.remote()

    def end(self) -> None:
        """Have the keeper clean up within CLEAN_UP_S, then end it."""
        ray.wait([self.drop()], timeout=CLEAN_UP_S)
        self.kill()

    def kill(self) -> None:
        """End the keeper, and with it its process."""
        ray.kill(self._actor)


@dataclass
class Assignment:
    """A process's keeper, and the host and ports that it allocated."""

    client: ActorClient
    allocation: Allocation


class RayNodes:
    """Executes a plan on the nodes of a cluster. A process runs beside its keeper, and moves with its bundle."""

    def __init__(self, cluster: Cluster, config: RunConfig, plan: Plan, folder: Path) -> None:
        self._cluster, self._config, self._plan, self._folder = cluster, config, plan, folder
        self._token = f".nodes-{secrets.token_hex(8)}"
        self._here = ThisMachine({}, folder)
        self._places: dict[str, tuple[PlacementGroup, int, ProcessResources]] = {}
        self._groups: list[PlacementGroup] = []
        self._assignments: dict[str, Assignment] = {}
        # Clients of all keepers that were ever made.
        self._clients: list[ActorClient] = []
        self._children: dict[str, RemoteChild] = {}
        self._ports: dict[str, int] = {}
        self._hosts: dict[str, str] = {}

    def open(self) -> None:
        """Write a token into the run folder: a node that sees it shares the folder."""
        (self._folder / self._token).touch()
        self._here.open()

    def close(self) -> None:
        """End all keepers and release their placement groups."""
        for child in self._children.values():
            child.forget()
        endings = [client.drop() for client in self._clients]
        if endings:
            ray.wait(endings, num_returns=len(endings), timeout=CLOSE_S)
        for client in self._clients:
            client.kill()
        for group in self._groups:
            remove_placement_group(group)
        (self._folder / self._token).unlink(missing_ok=True)
        self._here.close()

    async def allocate(self) -> None:
        """Allocate a node and ports for every process. Raises NoRoom, and UserError if a node is unfit."""
        without_folder = await self._nodes_without_folder()
        check_sharing(self._config, self._plan, without_folder)
        shared = not without_folder
        log.info("the run folder is %s", "on all nodes" if shared else f"not on {', '.join(without_folder)}")
        for group in groups(self._plan, self._config.launcher.threads or 1, shared=shared):
            await self._reserve(group)
        await gather_or_cancel(*(self._assign(spec) for spec in self._plan.processes))

    async def start(self, spec: ProcessSpec, *, restarts: int) -> Process:
        """Start a process on its keeper's node, or on another if that node was lost. Raises UserError and NoRoom."""
        if spec.role == "prepare":
            return await self._here.start(spec, restarts=restarts)
        earlier = self._children.get(spec.name)
        if earlier is not None and earlier.lost:
            self._drop(spec.name)
        for _ in range(START_ATTEMPTS):
            assignment = self._assignments.get(spec.name) or await self._assign(spec)
            argv = spec.command(self._ports, self._hosts, restarted=restarts > 0)
            environment = spec.environment(self._ports, self._hosts)
            # Ray itself selects the GPUs on that node.
            for variable in select_devices([]):
                environment.pop(variable, None)
            try:
                started: Started = await assignment.client.ask("start", _portable(argv), environment)
            except (KeeperGone, KeeperSilent) as error:
                log.warning("%s: its keeper on %s failed: %s", spec.name, assignment.allocation.host, error)
                self._drop(spec.name)
                continue
            host = "" if assignment.allocation.host == self._cluster.address else assignment.allocation.host
            path = self._folder / "logs" / f"{spec.name}.log"
            self._children[spec.name] = RemoteChild(spec.name, assignment.client, started, host, path)
            return self._children[spec.name]
        raise NoRoom(f"{spec.name}: no keeper could start it in {START_ATTEMPTS} attempts; see logs/launcher.log")

    def _drop(self, name: str) -> None:
        if (assignment := self._assignments.pop(name, None)) is not None:
            assignment.client.end()

    def places(self) -> tuple[Mapping[str, int], Mapping[str, str]]:
        """Return the current ports and hosts; a host changes when its process moves to another node."""
        return self._ports, self._hosts

    async def _nodes_without_folder(self) -> list[str]:
        """Return the addresses of the nodes that do not see the run folder."""
        nodes = [(node["NodeID"], node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]
        run = self._folder.absolute()

        async def sees(node_id: str) -> bool:
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
            async with time_limit(NODE_ANSWER_S):
                return await sees_folder.options(num_cpus=0, scheduling_strategy=strategy).remote(run, self._token)

        try:
            seen = await gather_or_cancel(*(sees(node_id) for node_id, _ in nodes))
        except TimeoutError:
            raise NoRoom(
                f"a node of the Ray cluster did not answer within {NODE_ANSWER_S:g} s; see `ray status`"
            ) from None
        except RayError as error:
            raise NoRoom(
                f"a node of the Ray cluster cannot be used: {_first_line(error)}; every node needs rl-async, and "
                "the same Python and Ray"
            ) from error
        return [address for (_, address), sees_it in zip(nodes, seen, strict=True) if not sees_it]

    async def _reserve(self, group: NodeGroup) -> None:
        """Create a placement group. Raises NoRoom after rollout.start_timeout_s."""
        selector = [{NODE: self._cluster.node_id} if bundle.home else {} for bundle in group.bundles]
        made = placement_group(
            [bundle.resources for bundle in group.bundles], strategy=group.strategy, bundle_label_selector=selector
        )
        self._groups.append(made)
        for index, bundle in enumerate(group.bundles):
            self._places.update({resources.name: (made, index, resources) for resources in bundle.processes})
        try:
            async with time_limit(self._plan.start_timeout_s):
                await made.ready()
        except TimeoutError:
            where = " on this node" if group.name == "home" else ""
            wanted = [bundle.resources for bundle in group.bundles]
            raise NoRoom(
                f"the Ray cluster has no room{where} for {_names(group.bundles)}: they need {wanted}, and free are "
                f"{ray.available_resources()}; add nodes, or configure fewer engines, workers or threads"
            ) from None

    async def _assign(self, spec: ProcessSpec) -> Assignment:
        """Make a keeper in the process's bundle, which Ray moves to another node when its node dies.

        Raises NoRoom after rollout.start_timeout_s, and UserError if the node is unfit.
        """
        deadline = time.monotonic() + self._plan.start_timeout_s
        group, index, resources = self._places[spec.name]
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "scheduling_strategy": strategy}
        while True:
            client = ActorClient(Actor.options(**options).remote(ray.util.get_node_ip_address))
            self._clients.append(client)
            left = deadline - time.monotonic()
            try:
                allocation: Allocation = await client.ask("allocate", self._request(spec), timeout_s=max(0.0, left))
                break
            except (KeeperGone, KeeperSilent) as error:
                client.end()
                # The actor cannot be made at all, for example on a node without rl-async.
                broken = isinstance(error.__cause__, ActorDiedError) and "creation task" in str(error.__cause__)
                if left <= 0 or broken:
                    raise NoRoom(
                        f"{spec.name}: no node took it within rollout.start_timeout_s={self._plan.start_timeout_s:g} "
                        f"({resources.cpus:g} CPU, {resources.gpus:g} GPU): {error.__cause__ or error}; add a node and "
                        "continue with --resume"
                    ) from error
                await asyncio.sleep(RETRY_S)
        if not allocation.shared and spec.role == "trainer" and allocation.host != self._cluster.address:
            raise UserError(
                f"launcher.run_dir: {allocation.host}, where {spec.name} must continue, does not see {self._folder}; "
                "mount it there, or remove the node from the cluster, and continue with --resume"
            )
        moved = self._hosts.get(spec.name) is not None
        self._ports.update(allocation.ports)
        self._hosts[spec.name] = allocation.host
        self._assignments[spec.name] = Assignment(client, allocation)
        log.info("%s: on %s", spec.name, allocation.host)
        if moved and spec.role == "reward-model":
            # Processes whose command lines hold its old address restart with the new one.
            for other in self._plan.processes:
                if other.name != spec.name and other.mentions(spec.name) and other.name in self._children:
                    self._children[other.name].kill_now()
        return self._assignments[spec.name]

    def _request(self, spec: ProcessSpec) -> AllocationRequest:
        names = {spec.name, RENDEZVOUS if spec.name == "trainer-0" else meeting_port(spec.name)}
        # A process that stays on this node must also keep its port.
        again = self._ports if stays_on_launcher_node(spec) else {}
        return AllocationRequest(
            name=spec.name,
            cwd=str(Path.cwd()),
            run=str(self._folder),
            token=self._token,
            files=_run_files(self._config, self._folder, spec),
            folders=folders_of(self._config, self._plan, spec),
            ports=[(w.name, again.get(w.name, w.port), w.key) for w in self._plan.ports if w.name in names],
            engine_kind=spec.engine_kind,
            python=_portable([spec.argv[0]])[0],
        )


def _run_files(config: RunConfig, folder: Path, spec: ProcessSpec) -> dict[str, bytes]:
    """Return the files of the run folder that a process reads: the config, tokens and the keys of its role."""
    paths = [folder / "config.yaml", token_file(folder, "metrics")]
    if spec.role in TOKEN_HOLDERS:
        paths.append(token_file(folder, "engines"))
    if not config.queue.keys and spec.role in KEY_HOLDERS:
        keys = folder / "keys"
        paths += [keys / "server.pub", keys / ("reader.key" if spec.role == "queue" else f"{spec.role}.key")]
        if spec.role in ("queue", "shard"):
            paths += [keys / "server.key", *(keys / "clients").glob("*.pub")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _portable(argv: list[str]) -> list[str]:
    """Replace the path of this Python, which may differ on another node, by an empty word."""
    return ["", *argv[1:]] if argv[0] == sys.executable else argv


def _names(bundles: tuple[Bundle, ...]) -> str:
    return ", ".join(resources.name for bundle in bundles for resources in bundle.processes)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
