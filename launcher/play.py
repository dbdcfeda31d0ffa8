"""``rl-async play``: runs an unchanged agent program for each episode of a run, and grades its work.

``Player`` leases episodes from the gateway, several at once, until the run is over. For each, ``started`` starts a
keeper process (``rl_async/process/guard.py``), which starts the agent program in its own workspace. At the end the
keeper kills the remaining processes and removes the workspace, even if ``play`` itself was killed. The user's
``FUNCTION(workspace, task, stdout)``, which may also take ``exit_code`` and ``stderr`` by name, returns the reward.
"""

import asyncio
import contextlib
import inspect
import logging
import os
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from rl_async.errors import ConfigError, RlAsyncError, UserError
from rl_async.gateway import Gateway, GatewayError, RemoteEpisode
from rl_async.process import guard
from rl_async.process.run_files import kill_marked
from rl_async.reward_loop.api import REWARD, Score, to_score
from rl_async.reward_loop.scorers.scorer_registry import describe
from rl_async.userload import load_user_object

log = logging.getLogger("rl_async.play")

# Characters of a program's last line that are reported.
LAST_WORDS = 500
# Only the end of each output stream is kept.
KEPT_BYTES = 1 << 20
REMOVAL_S = 60.0
FILLED_IN = ("prompt", "workspace", "base_url", "anthropic_base_url")
# This variable differs between episodes, so that the processes of one can be found by it.
MARK = "OPENAI_BASE_URL"
# Programs would follow these variables out of HOME.
XDG_HOME = re.compile(r"XDG_\w+_HOME")
PLACEHOLDER = re.compile(rf"\{{({'|'.join(FILLED_IN)})\}}")


class Outcome(NamedTuple):
    """The end of a program. An episode with a ``problem`` is played again, otherwise it is graded."""

    problem: str
    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0

    @property
    def last_words(self) -> str:
        """The end of the last line on standard error or, if that is empty, on standard output."""
        lines = self.stderr.strip().splitlines() or self.stdout.strip().splitlines() or [""]
        return lines[-1][-LAST_WORDS:]


class CannotStart(Exception):
    """The operating system refused to start the program of one episode."""


class StopPipe:
    """Tells all waiting threads to stop, for good; ``stop`` may be called in a signal handler."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        self.stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)
        os.close(self._write)

    def stop(self) -> None:
        """Make ``fd`` readable for good."""
        self.stopped = True
        os.write(self._write, b".")


def found_program(program: Sequence[str]) -> list[str]:
    """Return the command with the absolute path of its program, since it is started in another folder.

    Raises UserError for a missing program or an unknown placeholder.
    """
    if not program:
        raise UserError("play: name the agent program behind --, such as: -- claude --bare -p '{prompt}'")
    path = shutil.which(program[0])
    if path is None:
        raise UserError(f"play: there is no program {program[0]!r}; give its path, or one on PATH")
    for word in program:
        if re.fullmatch(r"\{[a-z_]+\}", word) and not PLACEHOLDER.fullmatch(word):
            raise UserError(f"play: {word} is none of {', '.join(f'{{{name}}}' for name in FILLED_IN)}")
    return [os.path.abspath(path), *program[1:]]


def prompt_text(episode: RemoteEpisode) -> str:
    return "\n\n".join(str(message.get("content") or "") for message in episode.task["prompt"])


def arguments(program: Sequence[str], episode: RemoteEpisode, workspace: Path) -> list[str]:
    """Fill in the placeholders. No shell reads the arguments, so a placeholder's text stays within its own."""
    values = {
        "prompt": prompt_text(episode).replace("\0", ""),
        "workspace": str(workspace),
        "base_url": episode.base_url,
        "anthropic_base_url": episode.anthropic_base_url,
    }
    return [PLACEHOLDER.sub(lambda match: values[match[1]], word) for word in program]


def environment(episode: RemoteEpisode, given: Mapping[str, str], home: Path | None = None) -> dict[str, str]:
    """Return an environment that leads both vendors' clients to the episode, with ``home`` as its home directory."""
    if home is not None:
        given = {name: value for name, value in given.items() if not XDG_HOME.fullmatch(name)} | {"HOME": str(home)}
    host = urlsplit(episode.base_url).hostname or ""
    direct = {name: ",".join(filter(None, [given.get(name, ""), host])) for name in ("NO_PROXY", "no_proxy")}
    return {
        **given,
        **direct,
        MARK: episode.base_url,
        # LiteLLM and older clients read this one.
        "OPENAI_API_BASE": episode.base_url,
        "OPENAI_API_KEY": episode.api_key,
        "ANTHROPIC_BASE_URL": episode.anthropic_base_url,
        "ANTHROPIC_API_KEY": episode.api_key,
        "ANTHROPIC_AUTH_TOKEN": episode.api_key,
    }


class Program:
    """An agent program that was started for an episode."""

    def __init__(self, workspace: Path, keeping: "subprocess.Popen[bytes]", status: int) -> None:
        self.workspace = workspace
        self._keeping, self._status = keeping, status

    def wait(self, timeout_s: float, stop: StopPipe) -> Outcome:
        """Wait until the program and all its processes have ended; on a timeout the problem says so."""
        deadline = time.monotonic() + timeout_s
        assert self._keeping.stdout is not None and self._keeping.stderr is not None
        out, err = self._keeping.stdout.fileno(), self._keeping.stderr.fileno()
        read = {out: b"", err: b"", self._status: b""}
        whole = dict.fromkeys(read, 0)
        with selectors.PollSelector() as waiting:
            for fd in (*read, stop.fd):
                waiting.register(fd, selectors.EVENT_READ)
            while len(waiting.get_map()) > 1:
                ready = [key.fd for key, _ in waiting.select(max(0.0, deadline - time.monotonic()))]
                if stop.fd in ready:
                    return Outcome("play was stopped")
                if not ready:
                    return Outcome(f"its program did not end within {timeout_s:g} s")
                for fd in ready:
                    piece = os.read(fd, 1 << 16)
                    whole[fd] += len(piece)
                    read[fd] = (read[fd] + piece)[-KEPT_BYTES:]
                    if not piece:
                        waiting.unregister(fd)
                # The keeper was killed, and processes of the program may hold the other pipes open.
                if not read[self._status] and self._status not in waiting.get_map():
                    break
        said = {fd: end_of(text.decode(errors="replace"), whole[fd] - len(text), "bytes") for fd, text in read.items()}
        code = said[self._status].strip()
        ended = Outcome("", said[out], said[err], int(code or 0))
        if code and ended.exit_code >= 0:
            return ended
        how = f"was killed by signal {-ended.exit_code}" if code else "was lost with its keeper"
        return ended._replace(problem=told(f"its program {how}", ended.last_words))


def end_of(text: str, cut: int, unit: str) -> str:
    """Return the end of an output; if so much before it was cut, its first line says so."""
    return f"[cut: {cut} more {unit} before this]\n{text}" if cut else text


def told(what: str, last_words: str) -> str:
    """Append a program's last words to the description of an event."""
    return f"{what}: {last_words}" if last_words else what


def _pipe(opened: contextlib.ExitStack) -> tuple[int, int]:
    pipe = os.pipe()
    for end in pipe:
        opened.callback(os.close, end)
    return pipe


@contextmanager
def started(program: Sequence[str], episode: RemoteEpisode, *, own_home: bool = False) -> Iterator[Program]:
    """Start the program in a fresh workspace; when the block ends, its processes and files are removed.

    ``own_home`` also gives it a fresh home directory. Raises CannotStart, such as for a prompt that is too long for a
    command line.
    """
    # Closes the pipes if the keeper cannot be started.
    opened = contextlib.ExitStack()
    try:
        # The keeper makes this folder, and removes it.
        folder = Path(tempfile.gettempdir()) / f"rl-async-play-{os.urandom(8).hex()}"
        workspace = folder / "workspace"
        (lifeline_end, lifeline), (status, status_end) = _pipe(opened), _pipe(opened)
        words = [sys.executable, "-I", "-S", guard.__file__, guard.KEEP]
        words += [str(lifeline_end), str(status_end), str(folder)]
        keeping = subprocess.Popen(
            [*words, *arguments(program, episode, workspace)],
            env=environment(episode, os.environ, folder / "home" if own_home else None),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(lifeline_end, status_end),
            start_new_session=True,
        )
    except OSError as error:
        opened.close()
        raise CannotStart(f"its program cannot be started: {error.strerror}") from error
    os.close(lifeline_end)
    os.close(status_end)
    try:
        yield Program(workspace, keeping, status)
    finally:
        os.close(lifeline)
        os.close(status)
        for pipe in (keeping.stdout, keeping.stderr):
            assert pipe is not None
            pipe.close()
        _end(keeping, folder, episode)


def _end(keeping: "subprocess.Popen[bytes]", folder: Path, episode: RemoteEpisode) -> None:
    """Wait for the end of the keeper, and clean up in its place if it failed; log a folder that cannot be removed."""
    try:
        keeping.wait(REMOVAL_S)
    except subprocess.TimeoutExpired:
        keeping.kill()
        keeping.wait()
    if keeping.returncode != 0:
        kill_marked(MARK, episode.base_url)
    if os.path.lexists(folder):
        try:
            guard.remove(folder)
        except OSError as error:
            log.warning("%s cannot be removed: %s", folder, error.strerror)


KEY = "--reward"
# The function's name if only a file is given.
DEFAULT = "grade"
Grade = Callable[..., Any]
BY_NAME = ("exit_code", "stderr")
# While an episode is graded, a request to stop is noticed so soon.
STOP_S = 0.2
# A program that took all its time leaves so much for its grading.
LEAST_GRADE_S = 1.0


class CannotGrade(Exception):
    """The user's function raised, or did not return a usable number."""


def load_grade(reference: str) -> Grade:
    """Load ``path.py:name``, or ``grade`` of ``path.py``. Raises ConfigError unless it is a function."""
    reference = f"{reference}:{DEFAULT}" if reference.endswith(".py") else reference
    try:
        function = load_user_object(reference, KEY)
    except ConfigError:
        raise
    # Importing a user's file may raise anything.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{KEY}: loading {reference} raised {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigError(f"{KEY}: {reference} is not a function of workspace, task and stdout")
    loaded: Grade = function
    return loaded


def grade(
    function: Grade, workspace: Path, task: dict[str, Any], ended: Outcome, stop: StopPipe, timeout_s: float
) -> Score:
    """Grade an episode. The function returns a number, or a mapping with ``score``, more numbers and a ``reason``.

    It runs in a thread, which is left behind when it misses its deadline or ``stop`` is stopped: a thread cannot be
    ended, and must not keep ``play`` from ending. Raises CannotGrade.
    """
    outcome: Future[Score] = Future()

    def run() -> None:
        try:
            asked = {name: getattr(ended, name) for name in BY_NAME if name in inspect.signature(function).parameters}
            outcome.set_result(to_score(function(workspace, task, ended.stdout, **asked)))
        # The user's code may raise anything, even SystemExit, and only this episode fails by it.
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            outcome.set_exception(CannotGrade(describe(error)))

    threading.Thread(target=run, name="grade", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while not outcome.done() and not stop.stopped and (left_s := deadline - time.monotonic()) > 0:
        wait([outcome], timeout=min(left_s, STOP_S))
    if not outcome.done():
        raise CannotGrade(
            "was stopped" if stop.stopped else f"did not end within {timeout_s:.3g} s, the rest of the episode's time"
        )
    score = outcome.result()
    if REWARD in score.extra:
        raise CannotGrade(f"returned a number called {REWARD!r}, which is the name of the whole; call it another")
    return score


# The run's reward functions see at most this many characters from the end of a program's output.
OUTPUT = 100_000
# After this many failures in a row for each concurrent program, play ends.
FUTILE = 3


class ProgramFails(RlAsyncError):
    """The agent program failed in every episode, so playing on would use up the attempts of all samples."""


class Player:
    """Plays episodes with ``program`` until the run is over, ``stop`` is stopped, or too many fail in a row.

    ``reward`` grades the program's work; without it, the run's own reward functions score the last answer. ``say`` is
    called with one line per episode. With ``own_home``, each episode has its own home directory.
    """

    def __init__(
        self,
        program: Sequence[str],
        reward: Grade | None,
        stop: StopPipe,
        say: Callable[[str], None],
        *,
        timeout_s: float | None = None,
        at_once: int = 1,
        own_home: bool = False,
    ) -> None:
        self._program, self._reward, self._stop, self._say = program, reward, stop, say
        self._timeout_s, self._at_once, self._own_home = timeout_s, at_once, own_home
        self._lock = threading.Lock()
        # The rewards of accepted episodes.
        self.rewards: list[float] = []
        self.failed = self._in_a_row = 0

    def play(self, gateway: Gateway) -> None:
        """Play to the end. Raises ProgramFails, and GatewayError or OSError if the gateway refuses."""
        with ThreadPoolExecutor(self._at_once, thread_name_prefix="play") as pool:
            playing = [pool.submit(self._work, gateway) for _ in range(self._at_once)]
            for one in playing:
                one.result()
        if self._in_a_row >= FUTILE * self._at_once:
            raise ProgramFails(f"the agent program failed {self._in_a_row} times in a row; the lines above say how")

    def _work(self, gateway: Gateway) -> None:
        """Consumes episodes; produces their rewards. Waits for the gateway and the program; ended by ``stop``."""
        try:
            for episode in gateway.episodes(lambda: self._stop.stopped):
                self._note(episode, *self._play(episode))
        except BaseException:
            # Otherwise the other threads would play on, and the error would only surface at the end of the run.
            self._stop.stop()
            raise

    def _play(self, episode: RemoteEpisode) -> tuple[float | None, str, str]:
        """Play one episode; return its reward if it has one, the reason if it was given back, and a remark."""
        if self._stop.stopped:
            return self._give_back(episode, "play was stopped")
        timeout_s = episode.deadline_s if self._timeout_s is None else min(self._timeout_s, episode.deadline_s)
        deadline = time.monotonic() + timeout_s
        try:
            with started(self._program, episode, own_home=self._own_home) as program:
                ended = program.wait(timeout_s, self._stop)
                if ended.problem:
                    return self._give_back(episode, ended.problem)
                return self._end(episode, program, ended, max(deadline - time.monotonic(), LEAST_GRADE_S))
        except CannotGrade as error:
            return self._give_back(episode, f"its grading {error}")
        except (CannotStart, GatewayError) as error:
            return self._give_back(episode, str(error))

    def _end(
        self, episode: RemoteEpisode, program: Program, ended: Outcome, left_s: float
    ) -> tuple[float | None, str, str]:
        code, output = ended.exit_code, "\n".join(filter(None, [ended.stdout, ended.stderr]))
        about = {"exit_code": code, "output": end_of(output[-OUTPUT:], max(0, len(output) - OUTPUT), "characters")}
        try:
            if self._reward is None:
                answer = episode.score(about)
            else:
                score = grade(self._reward, program.workspace, episode.task, ended, self._stop, left_s)
                answer = episode.reward(score.value, score.reasons(REWARD), about, **score.extra)
        # The gateway refuses, for example, an episode without any answer.
        except GatewayError as error:
            return self._give_back(episode, told(str(error), ended.last_words))
        if not answer["accepted"]:
            return None, told(answer["reason"], ended.last_words), ""
        return answer["reward"], "", told(f" (its program ended with {code}", ended.last_words) + ")" if code else ""

    def _give_back(self, episode: RemoteEpisode, why: str) -> tuple[None, str, str]:
        episode.fail(why)
        return None, why, ""

    def _note(self, episode: RemoteEpisode, reward: float | None, problem: str, remark: str) -> None:
        task = f"task {episode.task['task_id']}"
        with self._lock:
            if problem:
                self.failed += 1
                self._in_a_row += not self._stop.stopped
                self._say(f"{task}: given back: {problem}")
            else:
                self._in_a_row = 0
                self.rewards += [] if reward is None else [reward]
                self._say(f"{task}: " + ("not scored" if reward is None else f"reward {reward:g}") + remark)
            if self._in_a_row >= FUTILE * self._at_once and not self._stop.stopped:
                self._stop.stop()
