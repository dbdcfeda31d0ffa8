"""The gateway's client, for agent programs. It needs only the standard library: where an agent program has an
environment of its own, ``pip install --no-deps rl-async`` is enough.

for episode in Gateway(url, token_file="runs/mine/keys/gateway.token").episodes():
    client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
    ...
    episode.reward(1.0)

While the program holds an episode, a thread tells the gateway that it lives (``agent.gateway.idle_timeout_s``).
"""

import http.client
import json
import math
import numbers
import secrets
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_async.errors import RlAsyncError
from rl_async.process.http_auth import bearer, read_token, token_from_environment

FINISHED = {"finished": True}
# Within an idle timeout.
HEARTBEATS = 4
# Scoring by a judge may take this long.
SLOW_S = 600.0


class GatewayError(RlAsyncError):
    """The gateway refused a request; the message is its answer."""


@dataclass(frozen=True, eq=False)
class RemoteEpisode:
    """One episode to play. ``task`` has prompt (chat messages), ground_truth, tools (schemas), partition and extra.

    ``base_url`` is for clients that speak OpenAI's dialects, ``anthropic_base_url`` for those that speak Anthropic's.
    """

    id: str
    base_url: str
    task: dict[str, Any]
    gateway: "Gateway"
    # From its beginning.
    deadline_s: float = math.inf

    @property
    def anthropic_base_url(self) -> str:
        """The URL for Anthropic's clients, which add ``/v1/messages`` themselves."""
        return self.base_url.removesuffix("/v1")

    @property
    def api_key(self) -> str:
        """The gateway's token, for the client that talks to ``base_url``."""
        return self.gateway.token

    def reward(
        self,
        value: float,
        reasons: Mapping[str, str] | None = None,
        program: Mapping[str, Any] | None = None,
        /,
        **parts: float,
    ) -> dict[str, Any]:
        """End the episode with this reward; ``accepted`` is false, with the reason, if it had ended.

        ``reasons`` are texts to record, for parts by their names and for ``reward``. ``program``: see ``score``. Raises
        GatewayError for a reward that is refused, and TypeError for one that is not a number, such as the None of a
        grader without a return, which would leave the scoring to the run's functions.
        """
        if not isinstance(value, numbers.Real):
            raise TypeError(f"the reward of episode {self.id} is {value!r:.80}, not a number")
        # Gateways of earlier versions know no reasons.
        given = {"reasons": dict(reasons)} if reasons else {}
        return self._end({"reward": float(value), "parts": parts} | given, program)

    def score(self, program: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """End the episode; the run's own reward functions score it.

        ``program``: ``exit_code`` and ``output`` of the agent program, which they get as ``extra_info["program"]``. A
        failure that is not the policy's (``agent.gateway.give_back``) gives the episode back, and ``accepted`` is
        false.
        """
        return self._end({}, program)

    def fail(self, error: str) -> dict[str, Any]:
        """Give the episode up; its sample is played again."""
        return self._end({"error": error})

    def heartbeat(self) -> bool:
        """Tell the gateway that the program lives; false if the episode has ended. The client does so by itself."""
        return self.gateway.post(f"/episodes/{self.id}/heartbeat", {})[0] == 200

    def _end(self, body: dict[str, Any], program: Mapping[str, Any] | None = None) -> dict[str, Any]:
        body |= {"program": dict(program)} if program is not None else {}
        # ``post`` repeats a request that got no answer.
        key = {"idempotency_key": secrets.token_urlsafe(16)}
        status, answer = self.gateway.post(f"/episodes/{self.id}/reward", body | key)
        # The episode ended, or the gateway was restarted since, or has lost the queue and ends.
        if status in (404, 503):
            return {"accepted": False, "reason": "the episode has ended", "rows": 0, "reward": None}
        if status != 200:
            raise GatewayError(f"{status}: {answer}")
        self.gateway.heartbeats.stop(self)
        return answer


class Heartbeats:
    """Sends heartbeats for the episodes that the program still holds, from a thread that ends with the last of them."""

    def __init__(self) -> None:
        self._held: weakref.WeakValueDictionary[str, RemoteEpisode] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._every_s = 0.0

    def start(self, episode: RemoteEpisode, every_s: float) -> None:
        """Send heartbeats for this episode until it is stopped, has ended, or is forgotten by the program."""
        with self._lock:
            self._held[episode.id], self._every_s = episode, every_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gateway heartbeats", daemon=True)
                self._thread.start()

    def stop(self, episode: RemoteEpisode) -> None:
        """Send no more heartbeats for an episode."""
        with self._lock:
            self._held.pop(episode.id, None)

    def _now(self) -> list[RemoteEpisode]:
        with self._lock:
            return list(self._held.values())

    def _run(self) -> None:
        """Produces heartbeats until no episode is held. Waits for the clock, and for the gateway's answers."""
        while True:
            time.sleep(self._every_s)
            for episode in self._now():
                try:
                    lives = episode.heartbeat()
                # GatewayError: another server answered, and not in JSON.
                except (OSError, GatewayError):
                    # The program's own requests will fail and tell it.
                    continue
                if not lives:
                    self.stop(episode)
                del episode
            with self._lock:
                if not self._held:
                    self._thread = None
                    return


class Gateway:
    """The gateway at ``url``, which must answer within ``start_s``.

    ``token_file`` has its token; by default the variable RL_ASYNC_TOKEN_FILE names the file. Once the gateway
    has answered, it counts as ended with its run if it does not answer for ``gone_s``; within that time the launcher
    restarts a gateway that died.
    """

    def __init__(
        self,
        url: str,
        *,
        token_file: str | Path | None = None,
        wait_s: float = 20.0,
        start_s: float = 60.0,
        gone_s: float = 20.0,
    ) -> None:
        self.token = token_from_environment() if token_file is None else read_token(Path(token_file))
        self._url, self._wait_s, self._start_s, self._gone_s = url.rstrip("/"), wait_s, start_s, gone_s
        self._answered = False
        self.heartbeats = Heartbeats()

    def episodes(self, stopping: Callable[[], bool] = lambda: False) -> Iterator[RemoteEpisode]:
        """Episodes to play, one after another, until the run is over, or ``stopping`` says so between two of them.

        Call it once in each thread that plays.
        """
        while not stopping():
            status, answer = self.post("/episodes", {"wait_s": self._wait_s})
            if status == 200:
                episode = RemoteEpisode(
                    answer["episode_id"], answer["base_url"], answer["task"], self, answer["deadline_s"]
                )
                self.heartbeats.start(episode, answer["idle_timeout_s"] / HEARTBEATS)
                yield episode
                # While this waits for the next one, only the program keeps the episode alive.
                del episode
            elif status != 503:
                raise GatewayError(f"{status}: {answer}")
            elif answer == FINISHED:
                return

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Post JSON; return status and body, or 503 and FINISHED if it is gone.

        Raises OSError if it never answered, and GatewayError if what answers does not do so in JSON.
        """
        return self._request(path, json.dumps(body).encode())

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Get JSON, as ``post`` does."""
        return self._request(path, None)

    def _request(self, path: str, body: bytes | None) -> tuple[int, dict[str, Any]]:
        headers = {"Content-Type": "application/json", **bearer(self.token)}
        request = urllib.request.Request(self._url + path, body, headers)
        deadline = time.monotonic() + (self._gone_s if self._answered else self._start_s)
        while True:
            try:
                status, text = _ask(request, self._wait_s + SLOW_S)
            except (urllib.error.URLError, ConnectionError, http.client.HTTPException) as error:
                # HTTPException: it died in the middle of its answer
                if time.monotonic() > deadline and self._answered:
                    return 503, FINISHED
                if time.monotonic() > deadline:
                    raise OSError(f"no gateway at {self._url}: {error}") from error
            else:
                try:
                    answer = json.loads(text)
                    if not isinstance(answer, dict):
                        raise ValueError(f"it is no JSON object: {text[:80]!r}")
                # A proxy's page, or a server that is stopping.
                except (ValueError, RecursionError) as error:
                    if time.monotonic() > deadline:
                        raise GatewayError(f"{status}: {text[:200].decode(errors='replace')}") from error
                else:
                    self._answered = True
                    return status, answer
            time.sleep(0.5)


def _ask(request: urllib.request.Request, timeout_s: float) -> tuple[int, bytes]:
    """Return status and body of the response, also of an error."""
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
