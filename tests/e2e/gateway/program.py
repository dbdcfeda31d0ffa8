"""An agent program of the gateway's end-to-end test: conversations side by side, a branch, and no reward of its own.

``python gateway_program.py URL``
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import openai

from rl_async.gateway import Gateway, RemoteEpisode


def play(episode: RemoteEpisode) -> None:
    """Two conversations, the first of which is branched: three rows."""
    client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
    question = list(episode.task["prompt"])

    def ask(*more: dict[str, str]) -> dict[str, str]:
        answer = client.chat.completions.create(model="policy", messages=[*question, *more], max_tokens=12)
        return {"role": "assistant", "content": answer.choices[0].message.content or ""}

    first = ask()
    ask()
    for text in ("3+4", "5*6"):
        ask(first, {"role": "user", "content": text})


def work(url: str) -> int:
    """Play episodes until the run is over; how many."""
    played = 0
    for episode in Gateway(url, wait_s=5).episodes():
        try:
            play(episode)
        except openai.OpenAIError as error:
            episode.fail(str(error))
        else:
            episode.score()
        played += 1
    return played


if __name__ == "__main__":
    with ThreadPoolExecutor(4) as pool:
        print(sum(pool.map(work, [sys.argv[1]] * 4)), "episodes played")
