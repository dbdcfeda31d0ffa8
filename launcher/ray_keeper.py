"""Processes on other nodes, without Ray itself (`ray_nodes`): where each goes, and who watches it there.

    launcher --allocate, start, stop, kill--> Keeper --signals--> the process
             <--watch: output, exit code--         <--its log, in a folder of this node--

``groups`` puts together the processes of a plan by the resources that each needs. ``Keeper`` starts and watches one on
its node, and ``RemoteChild`` controls it from the launcher. ``ray_nodes`` makes an actor of the keeper, and tests call
it directly.
"""

import asyncio
import ipaddress
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import psutil

from rl_async.accelerators import accelerator_here
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RlAsyncError, UserError
from rl_async.files import written_whole
from rl_async.launcher.plan.machine import check_engine_python
from rl_async.launcher.plan.planning import GATEWAY, Plan, PortWish, ProcessSpec, hold_ports
from rl_async.launcher.supervisor import TAIL_LINES, Child, Lifeline, tail_of

KEY_HOLDERS = ("queue", "shard", "worker", "trainer")
TOKEN_HOLDERS = ("engine", "reward-model", "worker", "trainer")
COMPUTES = ("engine", "trainer", "reward-model")
# The share of a processor for a process that mostly waits.
SMALL_CPUS = 0.25
Strategy = Literal["PACK", "STRICT_PACK", "SPREAD"]
# After this long without a call, the launcher has ended or given up on this node.
ORPHANED_S = 30.0
POLL_S = 0.1
CHUNK = 1 << 18


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
            f"weight_sync.way=disk: {', '.join(without_folder)} does not see the run folder, where weights are "
            "written; set weight_sync.folder to a folder that all nodes share, or use weight_sync.way=gloo"
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


class AllocationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The folders, files and ports that a process needs on its node."""

    name: str
    # The launcher's working directory and run folder; the latter is absolute or below the former.
    cwd: str
    run: str
    # A node that sees this file in the run folder shares the folder. Other nodes get copies of ``files``.
    token: str
    files: Mapping[str, bytes]
    # Pairs of config key and path.
    folders: Sequence[tuple[str, str]]
    # Triples of name, number (0 for a free port) and config key.
    ports: Sequence[tuple[str, int, str]] = ()
    engine_kind: str = ""
    # The engine's Python, if it is not this process's own.
    python: str = ""


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """The host and ports for a process to listen on. ``shared`` says whether the node sees the run folder."""

    host: str
    ports: Mapping[str, int]
    shared: bool


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A running process, whose output begins at ``offset`` of the log."""

    pid: int
    started: int
    offset: int


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """Output of a process. ``code`` is set once the process has ended and all of its output has been returned."""

    data: bytes
    code: int | None = None


class Keeper:
    """Keeps one process on its own node. Its methods run on one event loop."""

    def __init__(self, address: Callable[[], str]) -> None:
        self._host = address()
        self._exits = ExitStack()
        self._lifeline = self._exits.enter_context(Lifeline())
        self._scratch = Path(tempfile.mkdtemp(prefix="rl-async-"))
        self._exits.callback(shutil.rmtree, self._scratch, ignore_errors=True)
        # Copies of the run folder's files, if this node does not share the folder.
        self._files: Mapping[str, bytes] = {}
        self._held: list[socket.socket] = []
        self._child: Child | None = None
        self._cwd, self._run, self._name, self._shared = self._scratch, self._scratch, "", False
        self._last_call = time.monotonic()
        self._guard: asyncio.Task[None] | None = None

    async def allocate(self, request: AllocationRequest) -> Allocation:
        """Check this node, write the files that it lacks, and hold ports. Raises UserError if the node is unfit."""
        self._name = request.name
        self._check_node(request)
        if request.engine_kind:
            await asyncio.to_thread(check_engine_python, request.engine_kind, request.python or sys.executable)
        if not self._shared:
            self._files = request.files
            try:
                self._provide(self._files)
            except OSError as error:
                raise UserError(f"launcher.run_dir: {self._host} cannot write into {self._run}: {error}") from error
        if not self._held:
            self._held = hold_ports(self._host, [PortWish(*wish) for wish in request.ports])
            for held in self._held:
                self._exits.enter_context(held)
        ports = {name: held.getsockname()[1] for (name, _, _), held in zip(request.ports, self._held, strict=True)}
        return Allocation(host=self._host, ports=ports, shared=self._shared)

    def _check_node(self, request: AllocationRequest) -> None:
        if Path(request.cwd).is_dir():
            self._cwd = Path(request.cwd)
        self._run = self._cwd / request.run
        self._shared = sees(self._run, request.token)
        for key, path in request.folders:
            if not (self._cwd / path).is_dir():
                raise UserError(
                    f"{key}: {self._host}, where {request.name} is to run, has no folder {self._cwd / path}; put it "
                    "there, or on a file system that all nodes share"
                )

    def _provide(self, files: Mapping[str, bytes]) -> None:
        """Write files of the run folder here, readable by this user only; ``close`` removes them."""
        for name, content in files.items():
            path = self._run / name
            if path.exists() and path.read_bytes() != content:
                raise UserError(
                    f"launcher.run_dir: {self._host} has a {path} of another run; choose another --name, or move it "
                    "away"
                )
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Other processes of this node read the same files.
            with written_whole(path) as temporary:
                temporary.touch(0o600)
                temporary.write_bytes(content)
            self._exits.callback(path.unlink, missing_ok=True)

    async def start(self, argv: Sequence[str], env: Mapping[str, str]) -> Started:
        """Start the process, after ending an earlier one. An empty ``argv[0]`` stands for this node's Python."""
        await self.kill()
        # Another keeper of this node may have removed the same files when it closed.
        self._provide(self._files)
        stacks = self._run / "stacks" if self._shared else self._scratch
        stacks.mkdir(exist_ok=True)
        self._child = await Child.start(
            self._name,
            [argv[0] or sys.executable, *argv[1:]],
            {**env, **network(self._host)},
            self._scratch / f"{self._name}.log",
            self._lifeline,
            stacks / f"{self._name}.txt",
            self._cwd,
        )
        self._last_call = time.monotonic()
        self._guard = asyncio.create_task(self._kill_orphan(self._child))
        return Started(pid=self._child.pid, started=self._child.started, offset=self._child.log_start)

    async def watch(self, offset: int, wait_s: float) -> Output:
        """Return output from ``offset`` on, or the exit code, as soon as there is either; empty after ``wait_s``."""
        child = self._running()
        deadline = time.monotonic() + wait_s
        while True:
            self._last_call = time.monotonic()
            # The exit code is taken before reading, so that the last lines are not missed.
            code = child.returncode
            with child.log.open("rb") as file:
                file.seek(offset)
                data = file.read(CHUNK)
            if code is not None and not data:
                return Output(data=b"", code=await child.wait())
            if data or time.monotonic() > deadline:
                return Output(data=data)
            await asyncio.sleep(POLL_S)

    async def stop(self, timeout_s: float | None = None) -> None:
        """Send SIGTERM and wait for the process; with ``timeout_s``, kill it after that time."""
        if self._child is not None:
            await self._child.stop(timeout_s)

    async def kill(self) -> None:
        """Kill the process and everything that it started."""
        if self._child is not None:
            await self._child.kill()

    async def close(self) -> None:
        """End the process and remove the keeper's files from this node."""
        await self.kill()
        if self._guard is not None:
            self._guard.cancel()
        self._exits.close()

    def _running(self) -> Child:
        if self._child is None:
            raise UserError(f"{self._name} was not started on {self._host}")
        return self._child

    async def _kill_orphan(self, child: Child) -> None:
        """Kill the process if the launcher, which would start it on another node, has not called for ORPHANED_S.

        Waits for the clock; ends with the process.
        """
        while child.returncode is None:
            await asyncio.sleep(POLL_S)
            if time.monotonic() - self._last_call > ORPHANED_S:
                await child.kill()


def sees(run: Path, token: str) -> bool:
    """Whether the run folder on this node is the launcher's, rather than another one with the same path."""
    return (run / token).is_file()


def network(address: str) -> dict[str, str]:
    """Return variables that keep process groups off interfaces that other hosts cannot reach, unless already set."""
    interface = interface_of(address, _interfaces())
    names = ("GLOO_SOCKET_IFNAME", accelerator_here().interface)
    return {name: os.environ.get(name, interface) for name in names if interface}


def own_addresses() -> set[str]:
    """Return the IPv4 addresses of all interfaces of this machine."""
    return {address for addresses in _interfaces().values() for address, _ in addresses}


def _interfaces() -> dict[str, list[tuple[str, str | None]]]:
    return {
        name: [(own.address, own.netmask) for own in addresses if own.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }


WATCH_S = 2.0
ANSWER_S = 10.0
RETRY_S = 0.5
# After this long without an answer, even a keeper that still lives has killed the process.
LOST_S = ORPHANED_S + 10.0


class KeeperGone(RlAsyncError):
    """The keeper or its node has ended."""


class KeeperSilent(RlAsyncError):
    """The keeper did not answer in time, and may answer a later call."""


class KeeperClient(Protocol):
    """Calls the methods of one keeper from the launcher."""

    async def ask(self, method: str, *arguments: Any, timeout_s: float = ANSWER_S) -> Any:
        """Call a method of the keeper. Raises UserError as it does, KeeperGone, or KeeperSilent after ``timeout_s``."""
        ...

    def tell(self, method: str) -> None:
        """Call a method of the keeper without waiting for its answer."""
        ...


class RemoteChild:
    """A process with a keeper; see ``supervisor.Child``. Its output is copied to ``log`` on the launcher's node."""

    def __init__(self, name: str, client: KeeperClient, started: Started, host: str, log: Path) -> None:
        self.name, self.host, self.log = name, host, log
        self.pid, self.started = started.pid, started.started
        # Set when its keeper is gone.
        self.lost = False
        # Readers may open the log from now on.
        log.touch()
        self.log_start = log.stat().st_size
        self._client, self._offset, self._code = client, started.offset, None
        self._following = asyncio.create_task(self._follow())

    _code: int | None

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the number of the signal that killed it; a lost node counts as SIGKILL."""
        return self._code

    async def wait(self) -> int:
        """Wait until the process has ended and its output was copied. Like a local process, it has no deadline."""
        await asyncio.shield(self._following)
        assert self._code is not None
        return self._code

    async def stop(self, timeout_s: float | None) -> int:
        """Send SIGTERM to the process and wait for it; with ``timeout_s``, kill it after that time."""
        if self._code is None and timeout_s is None:
            self._client.tell("stop")
        elif self._code is None and timeout_s is not None:
            # ``_follow`` notices a lost process.
            with suppress(KeeperGone, KeeperSilent):
                await self._client.ask("stop", timeout_s, timeout_s=timeout_s + ANSWER_S)
        return await self.wait()

    async def kill(self) -> int:
        """Kill the process and everything that it started."""
        if self._code is None:
            with suppress(KeeperGone, KeeperSilent):
                await self._client.ask("kill")
        return await self.wait()

    def kill_now(self) -> None:
        """Kill the process without waiting until it has ended."""
        if self._code is None:
            self._client.tell("kill")

    def forget(self) -> None:
        """Stop following the process, without ending it."""
        self._following.cancel()

    def output(self) -> str:
        """Return the end of this process's output."""
        return tail_of(self.log, self.log_start)

    def tail(self) -> str:
        """Return the last lines of this process's output."""
        return "\n".join(self.output().splitlines()[-TAIL_LINES:])

    async def _follow(self) -> None:
        """Consumes the keeper's answers; produces the log and the exit code.

        Waits for the keeper, ANSWER_S each time. Unblocked by output, by the process's end, or by a keeper that is gone
        or was silent for LOST_S.
        """
        last_answer = time.monotonic()
        with self.log.open("ab", buffering=0) as file:
            while self._code is None:
                try:
                    answer: Output = await self._client.ask("watch", self._offset, WATCH_S)
                except KeeperSilent as error:
                    if time.monotonic() - last_answer < LOST_S:
                        await asyncio.sleep(RETRY_S)
                        continue
                    self._lose(file.write, error)
                    return
                except KeeperGone as error:
                    self._lose(file.write, error)
                    return
                last_answer = time.monotonic()
                file.write(answer.data)
                self._offset += len(answer.data)
                self._code = answer.code

    def _lose(self, write: Any, error: RlAsyncError) -> None:
        write(f"[launcher] {self.name} was lost with its node: {error}\n".encode())
        self.lost, self._code = True, -signal.SIGKILL
