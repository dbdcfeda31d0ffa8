"""The ``rl-async`` command with its roles forked instead of started: each saves the seconds of importing torch anew.

Run it as ``Forked("tests.support.forked_launcher", *arguments, parent=True)``. The roles come from the same fork
server, so they share nothing with the launcher; processes of another Python, such as vLLM's, are started as ever.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rl_async.launcher.cli.__main__ import main
from rl_async.process.role import LIFELINE_FD
from tests.support.forked import become, fork


class ForkedRole:
    """The part of ``asyncio.subprocess.Process`` that the supervisor uses."""

    def __init__(self, module: str, arguments: Sequence[str], env: Mapping[str, str], log: str, lifeline: int) -> None:
        held = Connection(os.dup(lifeline), writable=False)  # pickled, it becomes a descriptor of the new process
        self._process = fork(_become_role, module, tuple(arguments), dict(env), Path.cwd(), Path(log).absolute(), held)
        held.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def wait(self) -> int:
        while (code := self.returncode) is None:  # noqa: ASYNC110 - several wait, and one alone could be notified
            await asyncio.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


def _become_role(
    module: str, arguments: Sequence[str], env: dict[str, str], cwd: Path, log: Path, lifeline: Connection
) -> None:
    env[LIFELINE_FD] = str(lifeline.fileno())
    become(module, arguments, env, cwd, (log, log), session=True)


create_subprocess_exec = asyncio.create_subprocess_exec


async def start(*argv: str, stdout: Any, env: Mapping[str, str], pass_fds: Sequence[int], **options: Any) -> Any:
    """Stand in for ``asyncio.create_subprocess_exec`` as ``Child.start`` calls it."""
    if argv[:3] != (sys.executable, "-P", "-m"):
        return await create_subprocess_exec(*argv, stdout=stdout, env=env, pass_fds=pass_fds, **options)
    return ForkedRole(argv[3], argv[4:], env, stdout.name, *pass_fds)


if __name__ == "__main__":
    asyncio.create_subprocess_exec = start  # type: ignore[assignment]
    sys.exit(main())
