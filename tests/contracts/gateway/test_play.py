"""``rl-async play`` with real processes: graded, crashed, killed, interrupted, and nothing is left of any."""

import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.gateway import Gateway, RemoteEpisode
from rl_async.launcher.play import KEPT_BYTES, CannotStart, StopPipe, started
from rl_async.process import guard
from rl_async.process.http_auth import make_tokens
from rl_async.process.run_files import ENDED, Endpoints, state_of, write_endpoints
from rl_async.sandbox.bubblewrap import INSTALL
from tests.agent_programs import confine
from tests.contracts.gateway.peers import RunningGateway
from tests.unit.agent_loop.conftest import demos
from tests.unit.agent_loop.fakes import leased, run_config

AGENT = str(Path(__file__).parent / "agent.py")
PROMPT = "{workspace} '; rm -rf / $(x)\n--help"
GRADE = """
def grade(workspace, task, stdout):
    answer = (workspace / "answer.txt").read_text()
    assert stdout == f"said {answer}\\n", stdout
    return {"score": float(answer == task["ground_truth"]), "length": len(answer), "reason": f"it said {answer}"}
def by_code(workspace, task, stdout, *, exit_code, stderr):
    assert (stdout, stderr) == ("said 5\\n", "no good\\n"), (stdout, stderr)
    return -exit_code
def broken(workspace, task, stdout):
    raise ValueError("no such test")
"""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(demos("calculator", 300), 200)


class Playing:
    """A gateway, and ``rl-async play`` as a process."""

    def __init__(self, folder: Path, renderer: ChatRenderer) -> None:
        self.folder, self._renderer = folder, renderer
        self.temporary = folder / "tmp"
        self.pids = folder / "pids"
        for made in (self.temporary, self.pids):
            made.mkdir()
        (folder / "grade.py").write_text(GRADE)
        make_tokens(folder / "keys")
        self.gateway: RunningGateway | None = None
        self.process: subprocess.Popen[str] | None = None

    def begin(self, mode: str, *options: str, says: tuple[str, ...] = (), samples: int = 1) -> "Playing":
        config = run_config({"max_tokens": 100, "max_model_len": 4000}, max_tokens=3000)
        self.gateway = RunningGateway(config, leased(PROMPT, samples=samples), self._renderer, says)
        write_endpoints(self.folder, Endpoints(queue="none", gateway=self.gateway.url))
        program = [sys.executable, AGENT, mode, "{prompt}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rl_async.launcher.cli", "play", str(self.folder), *options, "--", *program],
            env=os.environ | {"TMPDIR": str(self.temporary), "PIDS": str(self.pids)},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self

    def wait_for(self, what: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 60
        assert self.process is not None
        while not what():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def hanging(self, programs: int) -> list[int]:
        """The pids of so many hanging programs and their children."""
        self.wait_for(lambda: sum(bool(file.read_text()) for file in self.pids.iterdir()) == programs)
        said = [file.read_text().split() for file in self.pids.iterdir()]
        assert all(Path(folder).is_dir() and self.temporary in Path(folder).parents for _, _, folder in said)
        return [int(pid) for one in said for pid in one[:2]]

    def end(self, number: int = signal.SIGINT) -> tuple[int, str]:
        assert self.process is not None
        self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output

    def nothing_is_left(self, *pids: int) -> None:
        deadline = time.monotonic() + 60
        while any(alive(pid) for pid in pids) or list(self.temporary.iterdir()):
            assert time.monotonic() < deadline, (pids, list(self.temporary.iterdir()))
            time.sleep(0.05)


def alive(pid: int) -> bool:
    return state_of(pid) not in ENDED


@pytest.fixture
def playing(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Iterator[Playing]:
    made = Playing(tmp_path, ChatRenderer(tokenizer))
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.communicate()
    if made.gateway is not None:
        made.gateway.stop()


def test_episodes_are_graded_by_what_the_program_left(playing: Playing) -> None:
    playing.begin("solve", "--reward", "grade.py", "-n", "2", says=("5", "51"), samples=2)
    queue = playing.gateway.queue
    playing.wait_for(lambda: len(queue.rows) == 2)
    code, output = playing.end()
    assert code == 128 + signal.SIGINT and "2 episodes played" in output, output
    rewards = sorted((row.reward, row.reward_parts["length"], row.reward_reasons["reward"]) for (row,) in queue.rows)
    assert rewards == [(0.0, 2.0, "it said 51"), (1.0, 1.0, "it said 5")] and queue.failures == []
    said = {rows[0].turns[0].text for rows in queue.rows}
    assert said == {PROMPT}, "the prompt is one argument, and nothing in it is a placeholder or read by a shell"
    playing.nothing_is_left()


def test_a_home_of_its_own_is_empty_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    episode = RemoteEpisode("e", "http://127.0.0.1:9/e/v1", {"prompt": []}, Gateway("http://127.0.0.1:9"))
    script = 'cd && pwd && ls -A && touch made && echo ${XDG_CONFIG_HOME-unset} && test -n "$OPENAI_BASE_URL"'
    homes = set()
    for own in (True, True, False):
        with (
            StopPipe() as stop,
            started(["/bin/sh", "-c", script if own else "echo $HOME"], episode, own_home=own) as on,
        ):
            ended = on.wait(60.0, stop)
            assert ended.exit_code == 0, ended
        home, *rest = ended.stdout.splitlines()
        assert (tmp_path in Path(home).parents) == own and rest == (["unset"] if own else [])
        homes.add(home)
        assert Path(home).exists() != own
    assert len(homes) == 3


def test_output_that_was_cut_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    episode = RemoteEpisode("e", "http://127.0.0.1:9/e/v1", {"prompt": []}, Gateway("http://127.0.0.1:9"))
    script = f"printf 'beginning%{KEPT_BYTES}s'; printf 'short' >&2"
    with StopPipe() as stop, started(["/bin/sh", "-c", script], episode) as program:
        ended = program.wait(60.0, stop)
    assert ended.stdout == "[cut: 9 more bytes before this]\n" + " " * KEPT_BYTES and ended.stderr == "short"


def test_without_a_function_the_runs_own_score_the_answer(playing: Playing) -> None:
    playing.begin("solve", says=("5",))
    playing.wait_for(lambda: playing.gateway.queue.rows)
    ((row,),) = playing.gateway.queue.rows
    assert row.reward_parts == {"exact_answer": 1.0}
    playing.end(signal.SIGTERM)
    playing.nothing_is_left()


@pytest.mark.parametrize("options", [[], ["--reward", "grade.py:by_code"]], ids=["by the run", "by a function"])
def test_a_failure_of_the_policy_is_graded_and_not_played_again(playing: Playing, options: list[str]) -> None:
    playing.begin("crash", *options, says=("5",))
    playing.wait_for(lambda: playing.gateway.queue.rows)
    ((row,),) = playing.gateway.queue.rows
    assert playing.gateway.queue.failures == []
    assert (row.reward, row.scored) == ((-3.0 if options else 1.0), True)
    assert "3" in row.error
    _, output = playing.end()
    assert "1 episodes played" in output and "no good" in output
    playing.nothing_is_left()


@pytest.mark.parametrize(
    ("mode", "options", "named"),
    [
        ("unasked", [], ["no_answers", "wrong flag"]),
        ("temporary", [], ["75", "give_back"]),
        ("killed", [], ["signal 9"]),
        ("solve", ["--reward", "grade.py:broken"], ["ValueError", "no such test"]),
    ],
)
def test_a_failure_gives_the_episode_back(playing: Playing, mode: str, options: list[str], named: list[str]) -> None:
    playing.begin(mode, *options, says=("5",))
    playing.wait_for(lambda: playing.gateway.queue.failures)
    (error,) = playing.gateway.queue.failures
    code, output = playing.end()
    assert all(part in error + output for part in named), (error, output)
    assert code == 128 + signal.SIGINT and "1 given back" in output and playing.gateway.queue.rows == []
    playing.nothing_is_left()


def test_failures_alone_end_it_before_all_samples_are_used_up(playing: Playing) -> None:
    playing.begin("killed", says=("5",) * 9, samples=9)
    output, _ = playing.process.communicate(timeout=60)
    assert playing.process.returncode == 1 and "3 times in a row" in output, output
    assert len(playing.gateway.queue.failures) == 3
    playing.nothing_is_left()


def test_an_interrupt_gives_everything_back(playing: Playing) -> None:
    pids = playing.begin("hang", "-n", "2", samples=2).hanging(2)
    code, output = playing.end()
    assert code == 128 + signal.SIGINT and "2 given back" in output, output
    assert len(playing.gateway.queue.failures) == 2
    playing.nothing_is_left(*pids)


def test_the_deadline_kills_the_program_and_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIDS", str(tmp_path))
    episode = RemoteEpisode("e", "http://127.0.0.1:9/e/v1", {"prompt": []}, Gateway("http://127.0.0.1:9"))
    with StopPipe() as stop, started([sys.executable, AGENT, "hang", "{prompt}"], episode) as program:
        deadline = time.monotonic() + 60
        while not (said := [file.read_text() for file in tmp_path.iterdir()]) or not said[0]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "5e-05 s" in program.wait(5e-5, stop).problem
    assert not any(alive(int(pid)) for pid in said[0].split()[:2]) and not program.workspace.parent.exists()


def test_a_play_that_is_killed_leaves_nothing(playing: Playing) -> None:
    pids = playing.begin("hang", "-n", "2", samples=2).hanging(2)
    playing.end(signal.SIGKILL)
    playing.nothing_is_left(*pids)


def test_a_keeper_that_is_killed_leaves_nothing_and_its_episode_is_given_back(playing: Playing) -> None:
    program, child = playing.begin("hang").hanging(1)
    parent = psutil.Process(program).parent()
    assert parent is not None
    parent.kill()
    playing.nothing_is_left(program, child)
    playing.wait_for(lambda: playing.gateway and playing.gateway.queue.failures)


def test_a_keeper_whose_play_is_gone_when_it_starts_leaves_nothing(tmp_path: Path) -> None:
    lifeline, gone = os.pipe()
    os.close(gone)
    status = os.open(os.devnull, os.O_WRONLY)
    words = [guard.__file__, guard.KEEP, str(lifeline), str(status), str(tmp_path / "its"), "sleep", "600"]
    done = subprocess.run([sys.executable, "-I", "-S", *words], pass_fds=(lifeline, status), timeout=60)
    os.close(lifeline)
    os.close(status)
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_removed_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (precious := tmp_path / "precious").mkdir(0o555)
    (precious / "in").mkdir(0o555)
    script = f"cd ..; mine=$PWD; cd /; rm -r $mine; ln -s {precious} $mine"
    episode = RemoteEpisode("e", "http://127.0.0.1:9/e/v1", {"prompt": []}, Gateway("http://127.0.0.1:9"))
    with StopPipe() as stop, started(["sh", "-c", script], episode) as program:
        assert program.wait(150.0, stop).problem == ""
    assert str(program.workspace.parent) in caplog.text
    assert {path.stat().st_mode & 0o777 for path in (precious, precious / "in")} == {0o555}


def test_what_a_program_locked_is_removed(tmp_path: Path) -> None:
    (folder := tmp_path / "its").mkdir()
    (folder / "workspace").mkdir()
    (folder / "workspace").chmod(0o500)
    folder.chmod(0)
    guard.remove(folder)
    assert not folder.exists()


def test_mistakes_are_found_before_an_episode_is_taken(playing: Playing) -> None:
    gateway = ["play", str(playing.folder), "--url", "http://127.0.0.1:9"]
    for words in (
        ["--", "no-such-program"],
        ["--", sys.executable, "{promt}"],
        ["--reward", "grade.py:nope", "--", "true"],
        ["-n", "0", "--", "true"],
    ):
        command = [sys.executable, "-m", "rl_async.launcher.cli", *gateway, *words]
        done = subprocess.run(command, cwd=playing.folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr


def test_a_prompt_that_fits_into_no_command_line_fails_its_episode_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    task = {"prompt": [{"role": "user", "content": "x" * 300_000}]}
    episode = RemoteEpisode("e", "http://127.0.0.1:9/e/v1", task, Gateway("http://127.0.0.1:9"))
    with pytest.raises(CannotStart), started(["true", "{prompt}"], episode):
        raise AssertionError("it was started")
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_cannot_be_started_does_not_wait_for_the_deadline(tmp_path: Path) -> None:
    script = tmp_path / "agent"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o700)
    episode = RemoteEpisode("e", "http://127.0.0.1:9/e/v1", {"prompt": []}, Gateway("http://127.0.0.1:9"))
    with StopPipe() as stop, started([str(script)], episode) as program:
        ended = program.wait(150.0, stop)
        assert ended.exit_code == guard.CANNOT_START and "cannot start" in ended.last_words


# The confinement of `python -m tests.agent_programs`: its program reaches the gateway, and nothing else.


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


@pytest.mark.skipif(shutil.which("bwrap") is None, reason=f"bwrap is not here; {INSTALL} installs it")
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
