"""Runs code that nobody vouches for: programs go in, their output comes out, and nothing else passes either way.

A `Sandbox` opens workspaces; the tools `python` and `bash` have one per episode, the scorer `code` one per answer.
`kinds.make_sandbox` makes the kind that the config names. To add one, write a class with the interface in a
file here and a line in `kinds.py`; users give their own as `path.py:class`. docs/reference/sandbox.md says how well
each kind isolates.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from rl_async.errors import ConfigError, RlAsyncError

Language = Literal["python", "bash"]
Limit = Literal["", "seconds", "cpu", "memory", "output", "files"]


class Result(msgspec.Struct, frozen=True):
    """How a program ended.

    Attributes:
        exit: Its exit code, or minus the signal that ended it.
        limit: The limit that it was ended for, or empty. A program that the kernel refuses memory, a process or space
            may go on, so these refusals do not show here.
    """

    stdout: bytes
    stderr: bytes
    exit: int
    limit: Limit
    seconds: float


class SandboxLost(RlAsyncError):
    """A workspace ended or did not answer; its files are gone, and it does not come back."""


class SandboxRefused(RlAsyncError):
    """A workspace could not do as it was asked, such as write a file that is larger than the space left."""


class Workspace(Protocol):
    """A folder, and a program in it. Programs run one at a time; files stay from one to the next, processes do not.

    Every method raises SandboxLost once the workspace is gone. Paths are relative to the folder, and lead nowhere else.
    """

    async def run(self, language: Language, code: str, *, stdin: bytes = b"", seconds: float | None = None) -> Result:
        """Run a program in the folder; ``seconds`` shortens the limit. Raises SandboxRefused if it cannot start."""
        ...

    async def put(self, path: str, data: bytes) -> None:
        """Write a file, and the folders on its way. Raises SandboxRefused."""
        ...

    async def get(self, path: str) -> bytes:
        """Read a file. Raises SandboxRefused if it is none, or leads out of the folder."""
        ...

    async def snapshot(self) -> bytes:
        """Return the folder's content, for ``restore`` of this or another workspace. Raises SandboxRefused."""
        ...

    async def restore(self, snapshot: bytes) -> None:
        """Replace the folder's content. Raises SandboxRefused if that fails, which leaves the folder incomplete."""
        ...

    async def close(self) -> None:
        """End the running program, and forget the files: nothing is left when this returns. May be called again."""
        ...


class Sandbox(Protocol):
    """Opens workspaces that share nothing. Making one raises ConfigError where it cannot work."""

    async def open(self, *, top: Sequence[str] = ()) -> Workspace:
        """Open an empty workspace, to be closed by the caller. Raises SandboxLost if it does not start.

        The names in ``top``, such as ``app``, become paths at the root (``/app``) that lead to the folder's files of
        these names. Raises ConfigError if the sandbox cannot add to its root.
        """
        ...


def refuse_top(kind: str, top: Sequence[str]) -> None:
    """Raise ConfigError if a sandbox whose root is given already should have further names there."""
    if top:
        raise ConfigError(f"sandbox.kind: {kind} cannot have /{', /'.join(top)} at its root; use bubblewrap")
