"""An agent program that answers freely, then asks for a JSON format: ``python formats_program.py URL``."""

import sys
from concurrent.futures import ThreadPoolExecutor

import openai
import pydantic

from rl_async.gateway import Gateway, RemoteEpisode


class Result(pydantic.BaseModel):
    result: int = pydantic.Field(ge=0, le=99)


def play(episode: RemoteEpisode) -> float:
    """A free answer, and one in the format; the reward is for a number that is nearly right."""
    client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
    messages = list(episode.task["prompt"])
    thought = client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
    messages += [{"role": "assistant", "content": thought.choices[0].message.content or ""}]
    messages += [{"role": "user", "content": "the result?"}]
    try:
        said = client.chat.completions.parse(model="policy", messages=messages, response_format=Result, max_tokens=60)
    except openai.LengthFinishReasonError:
        return 0.0
    parsed = said.choices[0].message.parsed
    assert parsed is not None
    return 1.0 / (1 + abs(parsed.result - 40))


def work(url: str) -> int:
    """Play episodes until the run is over; how many."""
    played = 0
    for episode in Gateway(url, wait_s=5).episodes():
        episode.reward(play(episode))
        played += 1
    return played


if __name__ == "__main__":
    with ThreadPoolExecutor(4) as pool:
        print(sum(pool.map(work, [sys.argv[1]] * 4)), "episodes played")
