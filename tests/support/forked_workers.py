"""Fork the workers of pytest-xdist from the tests' fork server, which saves each of them the imports of heavy packages.

execnet starts a worker as a process that runs the code that it reads from its standard input.
"""

import atexit
import os
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any

from execnet.gateway_base import ExecModel, Popen2IO
from execnet.gateway_io import Popen2IOMaster

from tests.support.forked import fork


class ForkedWorker(Popen2IOMaster):
    """A worker and the pipes to it. Stands in for ``Popen2IOMaster``, with the same arguments."""

    def __init__(self, args: list[str], execmodel: ExecModel) -> None:
        if args[0] != sys.executable:
            raise ValueError(f"workers are forked from this interpreter, not started by {args[0]}")
        its_input, to_it = Pipe(duplex=False)
        from_it, its_output = Pipe(duplex=False)
        # A worker may fork processes itself.
        self.popen: Any = fork(_become_worker, its_input, its_output, dict(os.environ), daemon=False)
        its_input.close()
        its_output.close()
        outfile, infile = os.fdopen(os.dup(to_it.fileno()), "wb"), os.fdopen(os.dup(from_it.fileno()), "rb")
        to_it.close()
        from_it.close()
        Popen2IO.__init__(self, outfile, infile, execmodel)

    def wait(self) -> int | None:
        self.popen.join()
        return self.popen.exitcode


def _become_worker(its_input: Connection, its_output: Connection, environment: Mapping[str, str]) -> None:
    os.dup2(its_input.fileno(), 0)
    os.dup2(its_output.fileno(), 1)
    its_input.close()
    its_output.close()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    # pytest imports these again, and rewrites their assertions.
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    try:
        exec(eval(sys.stdin.readline()))
    finally:
        # multiprocessing ends a process without these.
        atexit._run_exitfuncs()
