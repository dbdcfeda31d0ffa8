"""An agent program: plays episodes of one answer through a run's gateway, until the run is over. ``URL`` is its
argument."""

import http.client
import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from rl_async.gateway import Gateway, GatewayError, RemoteEpisode
from rl_async.process.http_auth import bearer

ANSWER_S = 20.0


def play(episode: RemoteEpisode) -> None:
    """Ask the policy once, and let the run's reward functions score the answer."""
    body = {"model": "policy", "messages": list(episode.task["prompt"])}
    headers = {"Content-Type": "application/json", **bearer(episode.api_key)}
    request = urllib.request.Request(f"{episode.base_url}/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            answer.read()
        episode.score()
    except (OSError, http.client.HTTPException) as error:  # refused, or the gateway was struck
        episode.fail(str(error))


def work(url: str) -> None:
    """Play one episode after another."""
    for episode in Gateway(url, wait_s=5).episodes():
        with suppress(GatewayError):  # of this episode; the next one may go well
            play(episode)


if __name__ == "__main__":
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [sys.argv[1]] * 8))
