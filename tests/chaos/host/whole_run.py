"""One run with its launcher, its Redis server, its judge, its disks, clocks, namespaces and agent program, and what
strikes it.

Only CLOCK_REALTIME moves, as when NTP or an operator sets a clock. A process that is started again goes on with the
clock of its predecessor.

The launcher is where the bridge is. Rules of nftables drop packets, so that kernels without netem will do.
"""

import errno
import http.server
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import redis

from rl_async.process.run_files import read_stat
from tests.chaos.history import Expected
from tests.chaos.host.launcher import PROXIED, Place
from tests.chaos.host.proxy import Proxy

SOURCE = Path(__file__).with_name("clock.c")
JUMPS_S = (2.0, 60.0, 3600.0, 6 * 3600.0)  # forwards or backwards, each up to half as long again


class Clocks:
    """Compiles the shim into ``folder``, where the clocks' files are too."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self._library = folder, folder / "clock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(self._library), str(SOURCE)], check=True)

    def environment(self, name: str) -> dict[str, str]:
        """Return the variables of a process that lives by the clock ``name``."""
        file = self._folder / name
        if not file.exists():
            file.write_bytes(struct.pack("=qq", 0, 0))
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(file)}

    def slow_disk(self, name: str, flush_s: float, seconds: float) -> None:
        """Have each flush of a process take ``flush_s``, for that long; one that has begun then takes its time."""
        for nanoseconds, pause_s in ((int(flush_s * 1e9), seconds), (0, 0.0)):
            with (self._folder / name).open("r+b", buffering=0) as file:
                file.seek(8)
                file.write(struct.pack("=q", nanoseconds))
            time.sleep(pause_s)

    def jump(self, name: str, rng: random.Random) -> None:
        """Set the clock forwards or backwards, by seconds to hours."""
        by = rng.choice((-1, 1)) * rng.choice(JUMPS_S) * (1 + rng.random() / 2)
        with (self._folder / name).open("r+b", buffering=0) as file:
            (now,) = struct.unpack("=q", file.read(8))
            file.seek(0)
            file.write(struct.pack("=q", now + int(by * 1e9)))


BALLAST = "ballast"
BLOCKS = (1 << 20, 1 << 12, 1)
AGAIN_S = 0.02  # within which freed space is filled again


class SmallDisk:
    """A tmpfs of ``megabytes`` at ``folder``, gone with its mount namespace."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self._folder = folder
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)

    def stay_full(self, seconds: float) -> None:
        """Fill it, and whatever is freed as well, for that long; then make room."""
        end = time.monotonic() + seconds
        try:
            with (self._folder / BALLAST).open("ab", buffering=0) as file:
                while time.monotonic() < end:
                    for block in BLOCKS:
                        _fill(file, bytes(block))
                    time.sleep(AGAIN_S)
        finally:
            (self._folder / BALLAST).unlink()

    def unmount(self) -> None:
        """Give the memory back, with everything in it."""
        subprocess.run(["umount", "--lazy", str(self._folder)], check=True)


def _fill(file: object, block: bytes) -> None:
    try:
        while file.write(block) == len(block):  # type: ignore[attr-defined]
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


VERDICT = json.dumps({"reason": "", "score": 10})
BODY = json.dumps({"choices": [{"index": 0, "message": {"content": VERDICT}, "finish_reason": "stop"}]}).encode()
BYTE_S = 0.5


class DrippingJudge:
    """Serves on ``host`` until it is closed."""

    def __init__(self, host: str) -> None:
        judge = self
        self._drips_until = 0.0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(BODY)))
                self.end_headers()
                sent = 0
                while time.monotonic() < judge._drips_until and sent < len(BODY) - 1:
                    self.wfile.write(BODY[sent : sent + 1])
                    sent += 1
                    time.sleep(BYTE_S)
                self.wfile.write(BODY[sent:])

            def log_message(self, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                """A client that waits no longer has hung up."""

        self._server = Server((host, 0), Handler)
        self.url = f"http://{host}:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def drip(self, seconds: float) -> None:
        """Be slow for that long; return at its end."""
        self._drips_until = time.monotonic() + seconds
        time.sleep(seconds)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


BRIDGE, HUB = "10.77.0.1", "launcher"
TABLE = (
    "table inet chaos { chain arriving { type filter hook input priority 0; }; "
    "chain leaving { type filter hook output priority 0; }; }"
)
RULES = (("arriving", "iifname"), ("leaving", "oifname"))


class Network:
    """A namespace with an address for every name, and the launcher's, which is the caller's own."""

    def __init__(self, names: Iterable[str]) -> None:
        self.addresses = {HUB: BRIDGE}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        for words in ("add br0 type bridge", "set br0 up"):
            _run("ip", "link", *words.split())
        _run("ip", "addr", "add", f"{BRIDGE}/24", "dev", "br0")
        _run("nft", TABLE)
        for number, name in enumerate(names, start=2):
            self._add(name, number)

    def _add(self, name: str, number: int) -> None:
        holder = self._holders[name] = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        own = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == own:
            time.sleep(0.005)
        address = self.addresses[name] = f"10.77.0.{number}"
        peer = f"veth{number}"
        _run("ip", "link", "add", peer, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        _run("ip", "link", "set", peer, "master", "br0", "up")
        for words in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _run(*self.enter(name), "ip", *words.split())
        _run(*self.enter(name), "nft", TABLE)

    def enter(self, name: str) -> tuple[str, ...]:
        """Return the words before a command that runs it in the namespace of that name."""
        return () if name == HUB else ("nsenter", f"--net=/proc/{self._holders[name].pid}/ns/net", "--")

    def lose(self, name: str, percent: int, seconds: float) -> None:
        """Drop that share of what arrives in and leaves a namespace, for that long; 100: all of it."""
        share = f"numgen random mod 100 < {percent} " if percent < 100 else ""
        for chain, interface in RULES:
            _run(*self.enter(name), "nft", f'add rule inet chaos {chain} {interface} != "lo" {share}drop')
        time.sleep(seconds)
        _run(*self.enter(name), "nft", "flush table inet chaos")

    def close(self) -> None:
        """End the namespaces; processes in them keep theirs until they end."""
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        # The end of a namespace takes its devices along, but not at once.
        for address in self.addresses.values():
            gone = ["ip", "link", "del", f"veth{address.rpartition('.')[2]}"]
            subprocess.run(gone, check=False, capture_output=True)
        _run("ip", "link", "del", "br0")
        _run("nft", "delete table inet chaos")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


ROOT = Path(__file__).resolve().parents[3]
EXPECTED = Expected(steps=60, groups=4, samples=4, staleness=1)  # steps: unless told otherwise
END_S = 240.0  # within which processes end with their launcher
BRIEF_S, LONG_S, LONG_SHARE = 2.0, (8.5, 13.0), 0.15  # of a freeze, of lost packets; see ``duration``
FULL_S, FULL_LONG_S = 1.5, (3.0, 8.0)
SILENT_S = 1.0  # at most, until Redis is started again
LOSSES = (30, 100)  # percent
SPELLS_S = (2.0, 12.0)  # of stuttering, of slow flushes, of a dripping judge
SHARE = 0.9  # of each period in which a process stands still or packets are lost
PERIODS_S = (0.1, 1.0)
FLUSH_S = (1.0, 5.0, 12.0)
LAST_WORDS = 2000  # bytes
# The last words of runs that faults ended.
ENDS = {"full": os.strerror(errno.ENOSPC).encode(), "memory": b"OutOfMemory"}
RUN_MB, REDIS_MB = 256, 64
# A master and its replica, until they change places.
REDIS_PORTS = (6400, 6401)
ROLES = ("queue", "shard", "engine", "worker", "gateway", "trainer", "launcher", "redis")
RUN_FOLDER, REDIS_FOLDER, JUDGE = "run folder", "redis folder", "judge"
ENGINE_LINK, REDIS_LINK = "engine link", "redis link"
MACHINE = "machine"
KINDS = {  # of faults, and whom each strikes
    "kill": ROLES,
    "freeze": ROLES,
    "clock": ROLES,
    "loss": ROLES,
    "full": (RUN_FOLDER, REDIS_FOLDER),
    "stall": ROLES,  # it stands still for about as long as others wait for it
    "stutter": ROLES,  # it stands still most of the time
    "delay": ROLES,  # its packets are lost most of the time, and arrive when they are sent again
    "fsync": ("queue", "trainer", "launcher", "redis"),
    "drip": (JUDGE,),
    # Through a proxy, pieces come late, nothing passes, or connections end.
    "late": (ENGINE_LINK, REDIS_LINK),
    "hold": (ENGINE_LINK, REDIS_LINK),
    "cut": (ENGINE_LINK, REDIS_LINK),
    # The master is gone, and its replica takes its place.
    "promote": ("redis",),
    # All processes stand still at once.
    "pause": (MACHINE,),
    # A process gets no more memory than it has.
    "memory": ("queue", "engine", "worker", "trainer"),
}
# No process dies of these.
SLOW = ("stall", "stutter", "delay", "fsync", "drip", "late", "hold", "promote", "pause")
MARGIN_BYTES = 1 << 20
STALLS_S = {  # what others wait for each of them, halved and doubled: see SMALL; Redis: socket_timeout of the journal
    **dict.fromkeys(("queue", "shard", "worker", "gateway", "launcher"), (8.0,)),
    "engine": (3.0, 6.0),
    "trainer": (6.0, 30.0),
    "redis": (5.0,),
    MACHINE: (8.0,),
}
FACTORS = (0.5, 1.0, 2.0)
NAMES = {  # processes by role
    "queue": ("queue",),
    "shard": ("shard-0", "shard-1"),
    "engine": ("engine-0", "engine-1"),
    "worker": ("worker-0", "worker-1"),
    "gateway": ("gateway",),
    "trainer": ("trainer-0", "trainer-1"),
    "launcher": ("launcher",),
    "redis": ("redis",),
}
SMALL = (
    f"data.train_batch_groups={EXPECTED.groups} rollout.group_size={EXPECTED.samples} "
    f"queue.max_staleness={EXPECTED.staleness} trainer.ranks=2 trainer.checkpoint_every=3 rollout.engines=2 "
    "trainer.collective_timeout_s=30 trainer.batch_timeout_s=200 agent.workers=2 queue.shards=2 queue.journal=redis "
    "queue.redis.replicas=1 "
    "queue.lease_s=8 queue.max_attempts=1000 weight_sync.timeout_s=6 weight_sync.sync_timeout_s=60 "
    "launcher.max_restarts=10000 launcher.stop_timeout_s=5 debug.min_train_s=0.3 eval.every=0 eval.tasks=4 "
    "warm_start.min_steps=1 warm_start.max_steps=2 warm_start.check_every=1 warm_start.gate=0"
).split()


class Fault(NamedTuple):
    """What strikes whom."""

    role: str
    kind: str


class Kind(NamedTuple):
    """What a run is made of: a gateway instead of workers; network namespaces instead of loopback; disks of its own."""

    gateway: bool
    network: bool
    disks: bool = True

    def __str__(self) -> str:
        return f"{'gateway' if self.gateway else 'workers'}, {'network namespaces' if self.network else 'loopback'}"

    def allows(self, fault: Fault) -> bool:
        """Whether the fault can strike such a run."""
        absent = "worker" if self.gateway else "gateway"
        possible = {"loss": self.network, "delay": self.network, "full": self.disks}.get(fault.kind, True)
        return fault.role != absent and possible


def _pinch(pid: int, seconds: float) -> None:
    """Have a process's next allocations fail for that long, but for what it has already."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    _, most = before = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + MARGIN_BYTES, most))
    time.sleep(seconds)
    resource.prlimit(pid, resource.RLIMIT_AS, before)


def duration(brief_s: float, long_s: tuple[float, float], rng: random.Random) -> float:
    """Return how long something lasts: mostly short, so that many faults fit into an hour, and sometimes longer than
    a lease (8 s) and a weight update (6 s) may take, since only those lose their place."""
    return rng.uniform(*long_s) if rng.random() < LONG_SHARE else rng.random() * brief_s


class WholeRun:
    """A run in ``home / name``, a disk of its own."""

    def __init__(self, home: Path, name: str, kind: Kind, expected: Expected, clocks: Clocks) -> None:
        self.name, self.kind, self.expected, self._clocks = name, kind, expected, clocks
        self.home, self.log = home / name, home / f"{name}.log"
        self.folder = self.home / "runs" / name
        self._redis_home = home / f"{name}-redis"
        for folder in (self.home, self._redis_home):
            folder.mkdir()
        self._disks: dict[str, SmallDisk] = {}
        if kind.disks:
            self._disks[RUN_FOLDER] = SmallDisk(self.home, RUN_MB)
            self._disks[REDIS_FOLDER] = SmallDisk(self._redis_home, REDIS_MB)
        self._here = [name for role, names in NAMES.items() if kind.allows(Fault(role, "kill")) for name in names]
        self._network = Network([name for name in self._here if name != "launcher"]) if kind.network else None
        hub = self._network.addresses["launcher"] if self._network else "127.0.0.1"
        self._judge = DrippingJudge(hub)
        self._targets, self._redis_host = self.log.with_suffix(".targets"), self._place("redis").host or "127.0.0.1"
        self._targets.mkdir()
        self._links = {
            ENGINE_LINK: Proxy(hub, self._engine),
            REDIS_LINK: Proxy(hub, lambda: (self._redis_host, REDIS_PORTS[self._master])),
        }
        (self._targets / "proxy").write_text(f"http://{hub}:{self._links[ENGINE_LINK].port}")
        self._hub = hub
        self._log_starts: dict[Path, int] = {}
        self._servers: dict[int, subprocess.Popen[bytes]] = {}
        self._master, self._redis_url = 0, f"redis://{hub}:{self._links[REDIS_LINK].port}/0"
        self._program: subprocess.Popen[bytes] | None = None
        self._prepared = home / "artifacts"
        if self._prepared.exists():
            shutil.copytree(self._prepared, self.home / "artifacts")
        self._start_redis()
        self._launch()

    @property
    def _redis(self) -> "subprocess.Popen[bytes]":
        return self._servers[self._master]

    def _engine(self) -> tuple[str, int]:
        """Return the address of the engine behind the proxy, as the launcher has written it down."""
        host, _, port = (self._targets / PROXIED).read_text().removeprefix("http://").rpartition(":")
        return host, int(port)

    # --- its processes ----------------------------------------------------------------------------------------------

    def _place(self, name: str) -> Place:
        before = list(self._network.enter(name)) if self._network else []
        host = self._network.addresses[name] if self._network else ""
        return Place(before, self._clocks.environment(name), host)

    def _start(self, name: str, command: list[str], log: Path) -> "subprocess.Popen[bytes]":
        place = self._place(name)
        environment = os.environ | place.environment | {"PYTHONPATH": str(ROOT)}
        with log.open("ab") as output:
            self._log_starts[log] = output.tell()
            return subprocess.Popen(
                [*place.before, *command], cwd=self.home, env=environment, stdout=output, stderr=output
            )

    def _start_redis(self) -> None:
        """Start what does not run of the master and its replica."""
        for number, port in enumerate(REDIS_PORTS):
            if number in self._servers and self._servers[number].poll() is None:
                continue
            folder = self._redis_home / str(port)
            folder.mkdir(exist_ok=True)
            words = f"redis-server --port {port} --bind {self._redis_host} --protected-mode no --appendonly yes"
            words += " --appendfsync always --repl-diskless-sync-delay 0"
            if number != self._master:
                words += f" --replicaof {self._redis_host} {REDIS_PORTS[self._master]}"
            log = self.log.with_suffix(f".redis-{port}.log")
            command = [*words.split(), "--dir", str(folder), "--save", ""]
            self._servers[number] = self._start("redis", command, log)

    def _promote(self) -> bool:
        """Kill the master and have the replica take its place; the old one then follows it. False if it lags behind."""
        other = 1 - self._master
        with redis.Redis(self._redis_host, REDIS_PORTS[other]) as replica:
            try:
                if replica.info("replication").get("master_link_status") != "up":
                    return False
            # It is being started, or reads what it has.
            except redis.ConnectionError:
                return False
            self._redis.kill()
            self._redis.wait()
            replica.replicaof("NO", "ONE")
        self._master = other
        self._links[REDIS_LINK].cut()
        return True

    def _launch(self, *more: str) -> None:
        places = self.log.with_suffix(".places.json")
        places.write_text(json.dumps({name: self._place(name) for name in self._here}))
        queue = self._place("queue").host or "127.0.0.1"
        words = ["launch", "--mode", "disaggregated", "--config", "calculator", "--name", self.name, *more, *SMALL]
        words += [
            f"trainer.steps={self.expected.steps}",
            f"queue.redis.url={self._redis_url}",
            f"queue.host={queue}",
            # The name by which others call the engine behind the proxy.
            f"launcher.http_hosts=[{self._hub}]",
            "reward.functions=[{name: exact_answer}, {name: judge, weight: 0.5}]",
            f"reward.judge={{url: '{self._judge.url}', model: m, timeout_s: 4, attempts: 2, cache: none}}",
        ]
        if self.kind.gateway:
            words.append(f"agent.gateway={{host: {self._place('gateway').host or '127.0.0.1'}}}")
        command = [sys.executable, "-m", "tests.chaos.host.launcher", str(places), str(self._targets), *words]
        self._launcher = self._start("launcher", command, self.log)

    def tend(self) -> None:
        """Start again what is not the launcher's to start: Redis, and the agent program."""
        self._start_redis()
        endpoints, token = self.folder / "endpoints.json", self.folder / "keys" / "gateway.token"
        if not self.kind.gateway or not endpoints.exists() or (self._program and self._program.poll() is None):
            return
        url = json.loads(endpoints.read_text())["gateway"]
        command = ["env", f"RL_ASYNC_TOKEN_FILE={token}", sys.executable, "-m", "tests.chaos.host.agent_program", url]
        self._program = self._start("launcher", command, self.log.with_suffix(".program.log"))

    def resume(self) -> None:
        """Start the launcher again, after its processes have ended."""
        deadline = time.monotonic() + END_S
        while left := [name for name in self._here if self._running(name)]:
            if time.monotonic() > deadline:
                sys.exit(f"processes outlived their launcher: {left}; see {self.folder}")
            time.sleep(0.05)
        if self._program:
            self._program.kill()
            self._program.wait()
        (self.folder / "endpoints.json").unlink(missing_ok=True)
        self._launch("--resume")

    def exit(self) -> int | None:
        """Return the launcher's exit code, or None while it runs."""
        return self._launcher.poll()

    def lacked(self, struck: Iterable[Fault]) -> str:
        """Return which of the faults the launcher that ended gave as its reason; empty if none of them."""
        said = self.log.read_bytes()[self._log_starts[self.log] :][-LAST_WORDS:]
        return next((fault.kind for fault in struck if fault.kind in ENDS and ENDS[fault.kind] in said), "")

    def steps(self) -> int:
        """Return how many lines of metrics there are, in all lineages."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def saved(self) -> bool:
        """Whether there is a checkpoint from which the run can be resumed."""
        return any(self.folder.glob("checkpoints/step-*/state.json"))

    def trained_all(self) -> bool:
        """Whether the checkpoint of the last step is saved."""
        return (self.folder / "checkpoints" / f"step-{self.expected.steps:06d}" / "state.json").exists()

    def _running(self, name: str) -> int | None:
        """Return the pid of a process of the launcher, if it runs."""
        path = self.folder / "processes.json"
        records = json.loads(path.read_text()) if path.exists() else []
        for record in records:
            stat = read_stat(record["pid"])
            if record["name"] == name and stat.started == record["started"] and stat.state not in ("Z", "gone"):
                return int(record["pid"])
        return None

    # --- faults -----------------------------------------------------------------------------------------------------

    def strike(self, fault: Fault, rng: random.Random) -> bool:
        """Strike, and return when the fault is over. False if no process of the role is running now."""
        if fault.kind == "full":
            self._disks[fault.role].stay_full(duration(FULL_S, FULL_LONG_S, rng))
            return True
        if fault.kind == "drip":
            self._judge.drip(rng.uniform(*SPELLS_S))
            return True
        if link := self._links.get(fault.role):
            return link.strike(fault.kind, rng.uniform(*SPELLS_S), rng)
        if fault.kind == "promote":
            return self._promote()
        if fault.kind == "pause":
            return self._pause(rng.choice(FACTORS) * rng.choice(STALLS_S[MACHINE]))
        name = rng.choice(NAMES[fault.role])
        if fault.kind == "clock":
            self._clocks.jump(name, rng)
            return True
        if fault.kind == "fsync":
            self._clocks.slow_disk(name, rng.choice(FLUSH_S), rng.uniform(*SPELLS_S))
            return True
        if fault.kind in ("loss", "delay"):
            assert self._network is not None
            if fault.kind == "loss":
                self._network.lose(name, rng.choice(LOSSES), duration(BRIEF_S, LONG_S, rng))
            for pause_s in self._pauses(fault, rng) if fault.kind == "delay" else ():
                self._network.lose(name, 100, pause_s)
                time.sleep(pause_s * (1 - SHARE) / SHARE)
            return True
        return self._signal(name, fault, rng)

    def _pauses(self, fault: Fault, rng: random.Random) -> list[float]:
        """Return how long something stands still each time that it does."""
        if fault.kind == "freeze":
            return [duration(BRIEF_S, LONG_S, rng)]
        if fault.kind == "stall":
            return [rng.choice(FACTORS) * rng.choice(STALLS_S[fault.role])]
        period_s = PERIODS_S[-1] if fault.kind == "delay" else rng.choice(PERIODS_S)
        return [SHARE * period_s] * round(rng.uniform(*SPELLS_S) / period_s)

    def _pause(self, seconds: float) -> bool:
        """Stop every process for that long, as when a machine is suspended. False if the launcher ends just now."""
        started = (self._launcher, self._program, *self._servers.values())
        everyone = [psutil.Process(process.pid) for process in started if process and process.poll() is None]
        everyone += [child for process in everyone for child in process.children(recursive=True)]
        stopped = []
        for process in everyone:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
                stopped.append(process)
        time.sleep(seconds)
        for process in stopped:
            process.resume()
        return self._launcher.poll() is None

    def _signal(self, name: str, fault: Fault, rng: random.Random) -> bool:
        kind = fault.kind
        own = {"launcher": self._launcher.pid, "redis": self._redis.pid}
        pid = own.get(name) or self._running(name)
        if pid is None:
            return False
        try:
            if kind == "kill":
                os.kill(pid, signal.SIGKILL)
            if kind == "memory":
                _pinch(pid, rng.uniform(*SPELLS_S))
                return True
            for pause_s in self._pauses(fault, rng) if kind != "kill" else ():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(pause_s)
                os.kill(pid, signal.SIGCONT)
                time.sleep(pause_s * (1 - SHARE) / SHARE)
        except ProcessLookupError:  # it ended before, or its supervisor replaced it while it was frozen
            return kind != "kill"
        if kind == "kill" and name == "redis":
            self._redis.wait()
            time.sleep(rng.random() * SILENT_S)
        if kind == "kill" and name == "launcher":
            self._launcher.wait()
            self.resume()
        return True

    # --- its end ----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End what is left; the launcher's processes end with it. Data and model are for the next run as well."""
        for process in (self._launcher, self._program, *self._servers.values()):
            if process is not None:
                process.kill()
                process.wait()
        if not self._prepared.exists() and (self.home / "artifacts").exists():
            shutil.copytree(self.home / "artifacts", self._prepared)

    def keep(self) -> Path:
        """Copy what is on the disks to beside them, since they end with this program; return where."""
        kept = self.home.with_name(f"{self.name}-kept")
        shutil.copytree(self.home, kept, symlinks=True)
        return kept

    def close(self) -> None:
        """Give up judge, disks and namespaces."""
        self._judge.close()
        for link in self._links.values():
            link.close()
        for disk in self._disks.values():
            disk.unmount()
        if self._network:
            self._network.close()
