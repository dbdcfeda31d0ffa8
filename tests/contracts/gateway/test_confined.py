"""The confinement of `scripts/try_agent_programs`: its program reaches the gateway, and nothing else."""

import http.server
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_async.sandbox.bubblewrap import INSTALL
from tests.agent_programs import confine

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason=f"bwrap is not here; {INSTALL} installs it")
PROGRAM = """
import json, os, socket, sys, urllib.error, urllib.request
def reached(url):
    try:
        return urllib.request.urlopen(url).status
    except urllib.error.URLError as error:
        return type(error.reason).__name__
def written(path):
    try:
        open(path, "w").close()
        return True
    except OSError:
        return False
def connected(path):
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        return True
    except OSError:
        return False
_, ours, other, elsewhere, bound = sys.argv
found = [connected(bound), reached(ours), reached(other), written("x"), written(elsewhere), os.environ["HOME"]]
print(json.dumps(found))
sys.exit(3)
"""


class Here(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def urls() -> Iterator[list[str]]:
    """Two servers of this machine; the first plays the gateway."""
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Here) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [f"http://127.0.0.1:{server.server_port}/v1" for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_confined_program_reaches_the_gateway_only_and_writes_to_its_folder_only(
    urls: list[str], tmp_path: Path
) -> None:
    workspace = tmp_path / "episode" / "workspace"
    workspace.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(bound := f"{folder}/bound")
        listener.listen()
        program = [sys.executable, "-c", PROGRAM, *urls, str(elsewhere), bound]
        command = [sys.executable, confine.__file__, urls[0], str(tmp_path), "--", *program]
        done = subprocess.run(command, cwd=workspace, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    home = str(workspace.parent / "home")
    assert json.loads(done.stdout) == [False, 200, "ConnectionRefusedError", True, False, home]
    assert (workspace / "x").exists() and not elsewhere.exists()
