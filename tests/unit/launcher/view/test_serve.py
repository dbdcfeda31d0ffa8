"""The page's process: what it leaves behind when it is ended."""

import http.client
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.recordings import make_run

SERVE = """
import os, sys
from pathlib import Path
from rl_async.launcher.view.page import serve
os.access = lambda *_: False  # root may write everywhere
serve([Path(sys.argv[1])], 0)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_temporary_index_goes_with_its_process(tmp_path: Path, number: signal.Signals) -> None:
    run, temporary = make_run(tmp_path / "run", steps=1), tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", SERVE, str(run)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = urlsplit(process.stdout.readline().strip())
            cookie = f"rl-async-view-{address.port}={address.path.removeprefix('/open/')}"
            connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=60)
            connection.request("GET", "/api/runs/run/choices", headers={"Cookie": cookie})
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read() and list(temporary.iterdir())
            connection.close()
            process.send_signal(number)
            assert process.wait(60) == 128 + number and not list(temporary.iterdir())
        finally:
            process.kill()
