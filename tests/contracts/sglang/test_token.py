"""Our start script of SGLang puts the check of the token around what SGLang hands to uvicorn.

A stand-in for SGLang's server, which starts uvicorn as SGLang 0.5.23 does; SGLang itself is not run.
"""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from rl_async.process.http_auth import TOKEN_FILE, bearer, make_tokens, run_token, token_file
from tests.support.ports import free_port

SERVER = """
import sys
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

routes = [Route(path, lambda request: Response("ok")) for path in ("/health", "/model_info")]
port = int(sys.argv[sys.argv.index("--port") + 1])
uvicorn.Server(uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=port)).run()
"""


def status(url: str, **headers: str) -> int:
    """The status of a GET; 0 if nothing listens."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


def test_requests_without_the_token_do_not_reach_sglang(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(SERVER)
    make_tokens(tmp_path / "keys")
    url, path = f"http://127.0.0.1:{(port := free_port())}", os.environ.get("PYTHONPATH", "")
    command = [sys.executable, "-m", "rl_async.rollout_server.sglang", "--port", str(port)]
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{path}", TOKEN_FILE: str(token_file(tmp_path, "engines"))}
    process = subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while status(f"{url}/health") == 0:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        assert status(f"{url}/health") == 200
        assert status(f"{url}/model_info") == status(url) == 401
        assert status(f"{url}/model_info", **bearer(run_token(tmp_path, "engines"))) == 200
        assert status(f"{url}/health", Origin="https://example.com") == 403
    finally:
        process.kill()
        process.wait()


def test_without_a_token_file_sglang_is_not_started(tmp_path: Path) -> None:
    (tmp_path / "sglang.py").touch()
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_FILE}
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "rl_async.rollout_server.sglang"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and TOKEN_FILE in ended.stderr and "Traceback" not in ended.stderr
