"""The client for agent programs; it needs only the standard library.

for episode in Gateway(url, token_file="runs/mine/keys/gateway.token").episodes():
    client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
    ...
    episode.reward(1.0)
"""

import http.client
import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_async.errors import RlAsyncError
from rl_async.process.http_auth import bearer, read_token, token_from_environment

FINISHED = {"finished": True}
SLOW_S = 600.0  # scoring by a judge may take this long


class GatewayError(RlAsyncError):
    """The gateway refused a request; the message is its answer."""


@dataclass(frozen=True)
class RemoteEpisode:
    """One episode to play. ``task`` has prompt (chat messages), ground_truth, tools (schemas), partition and extra."""

    id: str
    base_url: str
    task: dict[str, Any]
    gateway: "Gateway"

    @property
    def api_key(self) -> str:
        """The gateway's token, for the client that talks to ``base_url``."""
        return self.gateway.token

    def reward(self, value: float, **parts: float) -> dict[str, Any]:
        """End the episode with this reward; ``accepted`` is false, with the reason, if it had ended.

        Raises GatewayError for a reward that is refused.
        """
        return self._end({"reward": value, "parts": parts})

    def score(self) -> dict[str, Any]:
        """End the episode; the run's own reward functions score it."""
        return self._end({})

    def fail(self, error: str) -> dict[str, Any]:
        """Give the episode up; its sample is played again."""
        return self._end({"error": error})

    def _end(self, body: dict[str, Any]) -> dict[str, Any]:
        key = {"idempotency_key": secrets.token_urlsafe(16)}  # ``post`` repeats a request that got no answer
        status, answer = self.gateway.post(f"/episodes/{self.id}/reward", body | key)
        if status in (404, 503):  # it ended, or the gateway was restarted since, or has lost the queue and ends
            return {"accepted": False, "reason": "the episode has ended", "rows": 0, "reward": None}
        if status != 200:
            raise GatewayError(f"{status}: {answer}")
        return answer


class Gateway:
    """The gateway at ``url``, which must answer within ``start_s``.

    ``token_file`` has its token; None: the environment variable RL_ASYNC_TOKEN_FILE names the file. Once the gateway
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

    def episodes(self) -> Iterator[RemoteEpisode]:
        """Episodes to play, one after another, until the run is over. Call it once in each thread that plays."""
        while True:
            status, answer = self.post("/episodes", {"wait_s": self._wait_s})
            if status == 200:
                yield RemoteEpisode(answer["episode_id"], answer["base_url"], answer["task"], self)
            elif status != 503:
                raise GatewayError(f"{status}: {answer}")
            elif answer == FINISHED:
                return

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Post JSON; return status and body, or 503 and FINISHED if it is gone. Raises OSError if it never answered."""
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json", **bearer(self.token)}
        )
        deadline = time.monotonic() + (self._gone_s if self._answered else self._start_s)
        while True:
            try:
                status, answer = _ask(request, self._wait_s + SLOW_S)
            except (urllib.error.URLError, ConnectionError, http.client.HTTPException) as error:
                # HTTPException: it died in the middle of its answer
                if time.monotonic() > deadline and self._answered:
                    return 503, FINISHED
                if time.monotonic() > deadline:
                    raise OSError(f"no gateway at {self._url}: {error}") from error
                time.sleep(0.5)
            else:
                self._answered = True
                return status, json.loads(answer)


def _ask(request: urllib.request.Request, timeout_s: float) -> tuple[int, bytes]:
    """Return status and body of the response, whatever its status."""
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
