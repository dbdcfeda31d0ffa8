"""Plays the episodes of a gateway with an agent program, several at once, until the run is over."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rl_async.errors import RlAsyncError
from rl_async.gateway import Gateway, GatewayError, RemoteEpisode
from rl_async.launcher.play.grading import CannotGrade, Grade, grade
from rl_async.launcher.play.program import CannotStart, Outcome, Program, StopPipe, started, told
from rl_async.reward_loop.api import REWARD

OUTPUT = 100_000  # characters of what a program printed, its end, that the run's reward functions see
FUTILE = 3  # times the programs at once: so many failures in a row end play


class ProgramFails(RlAsyncError):
    """The agent program failed in every episode, so playing on would use up the attempts of all samples."""


class Player:
    """Plays with ``program`` until the run is over, ``stop`` is stopped, or nothing but failures comes.

    ``reward``: grades what the program did; None: the run's own reward functions score the last answer. ``say`` is
    called with one line per episode. ``own_home``: each episode has a home directory of its own.
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
        self.rewards: list[float] = []  # of those that were accepted
        self.failed = self._in_a_row = 0

    def play(self, gateway: Gateway) -> None:
        """Play until there is an end. Raises ProgramFails, and GatewayError or OSError if the gateway refuses."""
        with ThreadPoolExecutor(self._at_once, thread_name_prefix="play") as pool:
            playing = [pool.submit(self._work, gateway) for _ in range(self._at_once)]
            for one in playing:
                one.result()
        if self._in_a_row >= FUTILE * self._at_once:
            raise ProgramFails(f"the agent program failed {self._in_a_row} times in a row; the lines above say how")

    def _work(self, gateway: Gateway) -> None:
        """Consumes episodes, produces their ends. Waits for the gateway and the program; ended by ``stop``."""
        try:
            for episode in gateway.episodes(lambda: self._stop.stopped):
                self._note(episode, *self._play(episode))
        except BaseException:
            self._stop.stop()  # else the others would play on, and the error be seen at the end of the run
            raise

    def _play(self, episode: RemoteEpisode) -> tuple[float | None, str, str]:
        """Play one episode; its reward or None, why it was given back, and a remark on how its program ended."""
        if self._stop.stopped:
            return self._give_back(episode, "play was stopped")
        timeout_s = episode.deadline_s if self._timeout_s is None else min(self._timeout_s, episode.deadline_s)
        try:
            with started(self._program, episode, own_home=self._own_home) as program:
                ended = program.wait(timeout_s, self._stop)
                return self._give_back(episode, ended.problem) if ended.problem else self._end(episode, program, ended)
        except CannotGrade as error:
            return self._give_back(episode, f"its grading {error}")
        except (CannotStart, GatewayError) as error:
            return self._give_back(episode, str(error))

    def _end(self, episode: RemoteEpisode, program: Program, ended: Outcome) -> tuple[float | None, str, str]:
        code, output = ended.exit_code, "\n".join(filter(None, [ended.stdout, ended.stderr]))
        about = {"exit_code": code, "output": output[-OUTPUT:]}
        try:
            if self._reward is None:
                answer = episode.score(about)
            else:
                score = grade(self._reward, program.workspace, episode.task, ended)
                answer = episode.reward(score.value, score.reasons(REWARD), about, **score.extra)
        except GatewayError as error:  # such as an episode without any answer
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
