"""An agent program with the plain openai client, trained through the gateway. See docs/gateway.md.

pip install openai
rl-async launch --mode disaggregated --config calculator agent.gateway={}     # prints the gateway's URL
python examples/gateway_agent.py URL
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import openai

from rl_async.agent_loop.gateway.client import Episode, Gateway
from rl_async.agent_loop.tools.arithmetic import evaluate

CLIENT = openai.OpenAI(base_url="none", api_key="none")  # its connections are shared; making one takes long


def play(episode: Episode) -> str:
    """Answer the task with the help of a calculator, in three turns at most; the last thing that was said."""
    client = CLIENT.with_options(base_url=episode.base_url)
    messages = list(episode.task["prompt"])
    for _ in range(3):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=episode.task["tools"])
        said = answer.choices[0].message
        if not said.tool_calls:
            break
        messages.append(said.to_dict())
        for call in said.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)})
    return said.content or ""


def calculate(arguments: str) -> str:
    try:
        return str(evaluate(json.loads(arguments)["expression"]))
    except Exception as error:  # the model wrote the arguments, and is to learn what is wrong with them
        return f"error: {error}"


def work(url: str) -> int:
    """Play episodes until the run is over; how many."""
    played = 0
    for episode in Gateway(url).episodes():
        try:
            said = play(episode)
        except openai.OpenAIError as error:
            episode.fail(str(error))
        else:
            episode.reward(float(said.strip() == episode.task["ground_truth"]))
        played += 1
    return played


if __name__ == "__main__":
    programs = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    with ThreadPoolExecutor(programs) as pool:
        print(sum(pool.map(work, [sys.argv[1]] * programs)), "episodes played")
