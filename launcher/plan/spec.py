"""One process of a run: its command, its device, and how often it may be restarted."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rl_async import tracing
from rl_async.configs.derived import secret_variables
from rl_async.configs.schema.run import RunConfig
from rl_async.launcher.plan.ports import HOST
from rl_async.process.http_auth import HOSTS, TOKEN_FILE, token_file
from rl_async.process.role import wait_policy
from rl_async.reward_loop.model_client import api_key_variables

HOST_OF = re.compile(r"\{([\w-]+)\.host\}")
THIS_MACHINE: Mapping[str, str] = {}  # empty: every process has the loopback address

Role = Literal["prepare", "queue", "shard", "engine", "reward-model", "worker", "trainer"]

SECRETS: Mapping[str, Role] = {
    "RL_ASYNC_REDIS_PASSWORD": "queue",
    "WANDB_API_KEY": "trainer",
    "SWANLAB_API_KEY": "trainer",
}
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start. In ``argv`` and ``env``, ``{name}`` is replaced by the port of that name, and ``{name.host}``
    by the address of its host."""

    name: str
    role: Role
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()  # empty: it computes, if at all, on the CPU
    ranks: int = 1  # processes that it consists of and that compute: the workers of an engine
    max_restarts: int = 0
    first_argv: tuple[str, ...] = ()  # added when it is started for the first time
    restart_argv: tuple[str, ...] = ()  # added when it is started again
    memory_bytes: int | None = None  # None: unknown
    engine_kind: str = ""  # of an engine, for the registry

    @property
    def device(self) -> str:
        """``cpu``, or its GPUs as ``gpu:0,1``."""
        return f"gpu:{','.join(map(str, self.gpus))}" if self.gpus else "cpu"

    def command(
        self, ports: Mapping[str, int], hosts: Mapping[str, str] = THIS_MACHINE, *, restarted: bool = False
    ) -> list[str]:
        """Return the command line with ports and hosts filled in."""
        argv = self.argv + (self.restart_argv if restarted else self.first_argv)
        return [fill(part, ports, hosts) for part in argv]

    def environment(self, ports: Mapping[str, int], hosts: Mapping[str, str] = THIS_MACHINE) -> dict[str, str]:
        """Return ``env`` with ports and hosts filled in."""
        return {key: fill(value, ports, hosts) for key, value in self.env.items()}

    def mentions(self, name: str) -> bool:
        """Whether ``argv`` or ``env`` contain the port or the host of ``name``."""
        return any(f"{{{name}}}" in text or f"{{{name}.host}}" in text for text in (*self.argv, *self.env.values()))


def fill(text: str, ports: Mapping[str, int], hosts: Mapping[str, str] = THIS_MACHINE) -> str:
    """Replace ``{name}`` by a port number and ``{name.host}`` by an address."""
    for name, port in ports.items():
        text = text.replace(f"{{{name}}}", str(port))
    return HOST_OF.sub(lambda match: hosts.get(match[1], HOST), text)


def http_environment(config: RunConfig, run_dir: Path) -> dict[str, str]:
    """Return variables by which an HTTP server that does not read the run folder finds its token and its names, and
    where its spans go."""
    found = {TOKEN_FILE: str(token_file(run_dir, "engines")), HOSTS: ",".join(config.launcher.http_hosts)}
    endpoint = config.tracking.otlp_endpoint
    return found | ({tracing.VARIABLES[0]: endpoint} if endpoint else {})


def secrets(config: RunConfig) -> dict[str, Role]:
    """Return the variables that hold secrets, with the only role that uses each."""
    reader: Role = "worker"
    return {**SECRETS, **dict.fromkeys([*api_key_variables(config), *secret_variables(config.agent.mcp)], reader)}


def environment(config: RunConfig, role: Role) -> dict[str, str]:
    """Return variables that hide other roles' secrets, limit thread pools, and let their threads wait asleep."""
    threads = str(config.launcher.threads or 1)
    return {
        **{name: "" for name, user in secrets(config).items() if user != role},
        THREADS: threads,
        "MKL_NUM_THREADS": threads,
        **wait_policy(),
        "TOKENIZERS_PARALLELISM": "false",
    }
