"""Models and data sets of the Hugging Face Hub and of ModelScope, through their clients and stand-ins of servers."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from safetensors.numpy import save

from rl_async.launcher.sources import INSTALL_MODELSCOPE, modelscope_is_installed

# Two commands of up to 150 s.
pytestmark = pytest.mark.timeout(330)


# Servers that answer as the Hugging Face Hub and ModelScope do to their clients: commits, listings, files.


COMMIT = "c" * 40


Repos = Mapping[str, Mapping[str, bytes]]  # ``models/OWNER/NAME`` or ``datasets/OWNER/NAME`` -> files


class _Answering(BaseHTTPRequestHandler):
    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def fake_hub(repos: Repos) -> AbstractContextManager[str]:
    """Serve repositories as the Hub does; the URL."""

    class Handler(_Answering):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            for repo, files in repos.items():
                own = repo.removeprefix("models/")
                if path.startswith(f"/api/{repo}/tree/"):
                    return self.answer(json.dumps([_listed(name, body) for name, body in files.items()]).encode())
                if path.startswith(f"/api/{repo}"):
                    return self.answer(json.dumps({"id": own, "sha": COMMIT, "siblings": []}).encode())
                name = path.removeprefix(f"/{own}/resolve/{COMMIT}/")
                if name in files:
                    return self.answer(files[name], ETag=f'"{_oid(files[name])}"', **{"X-Repo-Commit": COMMIT})
            self.answer(b"", 404, **{"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

    return _serving(Handler)


def fake_modelscope(repos: Repos, unfetched: Collection[str] = ()) -> AbstractContextManager[str]:
    """Serve the branch ``master`` of repositories as ModelScope does; the URL. ``unfetched`` is listed only."""

    class Handler(_Answering):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(asked.query).items()}
            for repo, files in repos.items() if query.get("Revision") == "master" else ():
                api = f"/api/v1/{repo}/repo"
                if asked.path in (f"{api}/files", f"{api}/tree"):
                    listed = [_entry(name, body) for name, body in files.items()]
                    return self.answer(json.dumps({"Code": 200, "Success": True, "Data": {"Files": listed}}).encode())
                if asked.path == api and query.get("FilePath") in files.keys() - unfetched:
                    return self.answer(files[query["FilePath"]])
            self.answer(json.dumps({"Code": 10010205001, "Success": False, "Message": "not found"}).encode(), 404)

        do_HEAD = do_GET

    return _serving(Handler)


@contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _oid(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


def _listed(name: str, body: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(body), "oid": _oid(body)}


def _entry(name: str, body: bytes) -> dict[str, object]:
    return {"Type": "blob", "Path": name, "Size": len(body), "Sha256": hashlib.sha256(body).hexdigest()}


WEIGHTS = save({"a": np.zeros(1, np.float32)})
ROW = {"prompt": "what is 1+1?", "data_source": "sums", "reward_model": {"ground_truth": "2"}}
DATA = "datasets/org/tasks"
OUTSIDE = (
    "PROXY",
    "HF_",
    "HUGGING",
    "MODELSCOPE",
    "XDG_CACHE_HOME",
)  # variables with these in their names lead to other servers


def rl_async(folder: Path, endpoint: str, *arguments: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not any(o in name.upper() for o in OUTSIDE)}
    environment |= {
        "NO_PROXY": "127.0.0.1",
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": str(int(offline)),
        "MODELSCOPE_ENDPOINT": endpoint,
        "MODELSCOPE_CACHE": str(folder / "modelscope"),
        "MODELSCOPE_HOME": str(folder / "modelscope-home"),
    }
    command = [sys.executable, "-m", "rl_async.launcher.cli", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150)


needs_modelscope = pytest.mark.skipif(
    not modelscope_is_installed(), reason=f"ModelScope's client is not here: {INSTALL_MODELSCOPE}"
)


@pytest.fixture
def split() -> dict[str, bytes]:
    rows = json.dumps(ROW).encode() + b"\n"
    return {"main/train-00000-of-00002.jsonl": rows, "main/train-00001-of-00002.jsonl": rows, "loader.py": b"raise"}


def test_a_split_is_fetched_once_and_then_read_offline(tmp_path: Path, split: dict[str, bytes]) -> None:
    with fake_hub({DATA: split}) as endpoint:
        first = rl_async(tmp_path, endpoint, "data", "inspect", "org/tasks")
    again = rl_async(tmp_path, endpoint, "data", "inspect", "org/tasks", offline=True)
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert "2 rows\n" in first.stdout
    assert first.stdout == again.stdout
    assert f"snapshots/{COMMIT}/main/train-*.jsonl" in first.stdout
    assert not list(tmp_path.rglob("loader.py"))


@pytest.mark.parametrize(
    ("source", "named"), [("org/tsks", "org/tsks"), pytest.param("org/tasks:test", "test", marks=pytest.mark.slow)]
)
def test_what_the_hub_has_not_is_one_line(tmp_path: Path, split: dict[str, bytes], source: str, named: str) -> None:
    with fake_hub({DATA: split}) as endpoint:
        done = rl_async(tmp_path, endpoint, "data", "inspect", source)
    assert done.returncode == 2
    assert "data.path" in done.stderr and named in done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("offline", [pytest.param(False, marks=pytest.mark.slow), True])
def test_no_network_is_one_line_that_names_the_key(tmp_path: Path, offline: bool) -> None:
    done = rl_async(
        *(tmp_path, "http://127.0.0.1:9", "launch", "--config", "calculator", "--mode", "disaggregated", "--dry-run"),
        *("warm_start=null", "model.path=org/model"),
        offline=offline,
    )
    assert (done.returncode, done.stdout) == (2, "")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and errors[0].startswith("error: model.path: ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@needs_modelscope
def test_modelscope_is_asked_through_its_own_client(tmp_path: Path, split: dict[str, bytes]) -> None:
    wanted = {"config.json": b"{}", "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"}
    model = wanted | {"modeling.py": b"raise", "pytorch_model.bin": b"pickle", "other/model.safetensors": WEIGHTS}
    with fake_modelscope({DATA: split, "models/org/model": model}) as endpoint:
        first = rl_async(tmp_path, endpoint, "data", "inspect", "modelscope:org/tasks")
        other = rl_async(tmp_path, endpoint, "data", "inspect", "modelscope:org/tasks@v9")
        imported = rl_async(tmp_path, endpoint, "model", "import", "modelscope:org/model", "mine")
    assert first.returncode == 0, first.stderr
    assert "2 rows\n" in first.stdout
    assert imported.returncode == 0, imported.stderr
    assert wanted.keys() <= {file.name for file in (tmp_path / "mine").iterdir()}
    assert not [file for name in ("loader.py", "modeling.py", "*.bin", "other") for file in tmp_path.rglob(name)]
    assert other.returncode == 2 and "data.path: " in other.stderr and "v9" in other.stderr
    assert "Traceback" not in other.stderr

    # Without a network, its cache is taken. The client tries for 7 s, so both commands are run side by side.
    sources = "modelscope:org/tasks", "modelscope:org/others"
    with ThreadPoolExecutor(len(sources)) as pool:
        again, never = pool.map(partial(rl_async, tmp_path, "http://127.0.0.1:9", "data", "inspect"), sources)
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert first.stdout == again.stdout
    notice = "data.path: http://127.0.0.1:9 cannot be reached"
    assert notice in again.stderr and notice not in first.stderr
    assert never.returncode == 2 and never.stderr.count("error: data.path: ") == 1
    assert "Traceback" not in never.stderr


@needs_modelscope
@pytest.mark.parametrize(
    "path",
    ["../../../../../../evil-train.jsonl", pytest.param("{folder}/evil-train.jsonl", marks=pytest.mark.slow)],
)
def test_a_listed_path_that_leaves_the_folder_is_refused(tmp_path: Path, split: dict[str, bytes], path: str) -> None:
    path = path.format(folder=tmp_path / "elsewhere")
    with fake_modelscope({DATA: split | {path: b"{}"}}) as endpoint:
        done = rl_async(tmp_path, endpoint, "data", "inspect", "modelscope:org/tasks")
    assert done.returncode == 2 and done.stderr.count("error: data.path: ") == 1
    assert path in done.stderr and endpoint in done.stderr
    assert not list(tmp_path.rglob("evil-train.jsonl*")) and not list(tmp_path.rglob("train-*"))


@needs_modelscope
def test_what_was_fetched_in_part_is_not_taken(tmp_path: Path) -> None:
    model = dict.fromkeys(("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"), b"{}")
    with fake_modelscope({"models/org/model": model}, unfetched=["tokenizer_config.json"]) as endpoint:
        done = rl_async(tmp_path, endpoint, "model", "import", "modelscope:org/model", "mine")
    later = rl_async(tmp_path, "http://127.0.0.1:9", "model", "import", "modelscope:org/model", "mine")
    assert (done.returncode, later.returncode) == (2, 2), done.stderr + later.stderr
    assert done.stderr.count("error: SOURCE: ") == later.stderr.count("error: SOURCE: ") == 1
    assert not (tmp_path / "mine").exists()


@needs_modelscope
def test_a_changed_branch_is_read_without_what_it_was(tmp_path: Path, split: dict[str, bytes]) -> None:
    old = {"main/train-00000-of-00001.jsonl": json.dumps(ROW | {"prompt": "old"}).encode() + b"\n"}
    with fake_modelscope({DATA: old}) as endpoint:
        before = rl_async(tmp_path, endpoint, "data", "inspect", "modelscope:org/tasks")
    with fake_modelscope({DATA: split}) as endpoint:
        after = rl_async(tmp_path, endpoint, "data", "inspect", "modelscope:org/tasks")
    assert (before.returncode, after.returncode) == (0, 0), before.stderr + after.stderr
    assert "1 rows\n" in before.stdout
    assert "2 rows\n" in after.stdout


@pytest.mark.parametrize(
    "source",
    [
        "org/tasks@../..",
        pytest.param("org/tasks@/tmp", marks=pytest.mark.slow),
        pytest.param("modelscope:org/tasks@../..", marks=pytest.mark.slow),
    ],
)
def test_a_revision_is_no_path(tmp_path: Path, split: dict[str, bytes], source: str) -> None:
    done = rl_async(tmp_path, "http://127.0.0.1:9", "data", "inspect", source)
    assert done.returncode == 2 and "error: data.path: " in done.stderr
    assert "revision" in done.stderr and "127.0.0.1" not in done.stderr
