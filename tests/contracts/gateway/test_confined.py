"""The confinement of `python -m tests.agent_programs`: its program reaches the gateway, and nothing else."""

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
_, ours, other, elsewhere, bound, own = sys.argv
home = [os.path.exists(own), written(os.path.expanduser("~/mine"))]
found = [connected(bound), reached(ours), reached(other), written("x"), written(elsewhere), *home]
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


@pytest.fixture(params=[False, True], ids=["as it is", "with a link to the environment"])
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """The interpreter and the `confine.py` of this checkout, or of one whose environment is a link."""
    if not request.param:
        return Path(sys.executable), Path(confine.__file__)
    (script := tmp_path / "checkout" / "tests" / "agent_programs" / "confine.py").parent.mkdir(parents=True)
    shutil.copy(confine.__file__, script)
    (environment := tmp_path / "checkout" / ".venv").symlink_to(Path(sys.prefix).resolve())
    return environment / "bin" / "python", script


def test_a_confined_program_reaches_the_gateway_only_and_writes_to_its_folder_only(
    urls: list[str], tmp_path: Path, checkout: tuple[Path, Path]
) -> None:
    python, script = checkout
    workspace = tmp_path / "episode" / "workspace"
    workspace.mkdir(parents=True)
    workspace.with_name("home").mkdir()
    elsewhere = tmp_path / "elsewhere"
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as folder,
        tempfile.NamedTemporaryFile(dir=Path.home()) as own,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(bound := f"{folder}/bound")
        listener.listen()
        program = [str(python), "-c", PROGRAM, *urls, str(elsewhere), bound, own.name]
        command = [str(python), str(script), urls[0], str(tmp_path), "--", *program]
        done = subprocess.run(command, cwd=workspace, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout) == [False, 200, "ConnectionRefusedError", True, False, False, True]
    assert (workspace / "x").exists() and (workspace.parent / "home" / "mine").exists() and not elsewhere.exists()
