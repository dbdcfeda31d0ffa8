"""The page beside a run (``tracking.view``): a process of its own, which ends with the run and with its launcher."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rl_async.errors import UserError
from rl_async.launcher.supervise.process import Lifeline
from rl_async.process.role import LIFELINE_FD, own_module

END_S = 5.0
LOG = "view.log"


async def serve_beside(folder: Path, tell: Callable[[str], None]) -> None:
    """Serve the page on the run in ``folder`` until cancelled; ``tell`` gets its address.

    Raises UserError if the page ends by itself.
    """
    with Lifeline() as lifeline, (folder / "logs" / LOG).open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *own_module("launcher.cli", "view", str(folder)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, LIFELINE_FD: str(lifeline.read_end)},
            pass_fds=(lifeline.read_end,),
            start_new_session=True,
        )
        try:
            assert process.stdout is not None  # PIPE
            address = (await process.stdout.readline()).decode().strip()
            if address:
                tell(address)
            code = await process.wait()
            raise UserError(f"tracking.view: the page ended with exit code {code}; see {folder / 'logs' / LOG}")
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_S)
            with suppress(ProcessLookupError):
                process.kill()
