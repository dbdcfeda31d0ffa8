"""An agent program with the plain openai client, trained through the gateway. See docs/how-to/gateway.md.

pip install openai
rl-async launch --mode disaggregated --config calculator agent.gateway={}     # prints URL and token file
RL_ASYNC_TOKEN_FILE=runs/NAME/keys/gateway.token python examples/gateway_agent.py URL
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import openai

from rl_async.agent_loop.tools.tool import evaluate
from rl_async.gateway import Gateway, RemoteEpisode

CLIENT = openai.OpenAI(base_url="none", api_key="none")  # shared: creating a client is slow


def play(episode: RemoteEpisode) -> str:
    """Solve the task with a calculator in at most three turns; return the last answer."""
    client = CLIENT.with_options(base_url=episode.base_url, api_key=episode.api_key)
    messages = list(episode.task["prompt"])
    for _ in range(3):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=episode.task["tools"])
        reply = answer.choices[0].message
        if not reply.tool_calls:
            break
        messages.append(reply.to_dict())
        for call in reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)})
    return reply.content or ""


def calculate(arguments: str) -> str:
    try:
        return str(evaluate(json.loads(arguments)["expression"]))
    except Exception as error:  # the model wrote the arguments and should see what is wrong with them
        return f"error: {error}"


def work(url: str) -> int:
    """Play episodes until the run is over; return their number."""
    played = 0
    for episode in Gateway(url).episodes():
        try:
            answer = play(episode)
        except openai.OpenAIError as error:
            episode.fail(str(error))
        else:
            episode.reward(float(answer.strip() == episode.task["ground_truth"]))
        played += 1
    return played


if __name__ == "__main__":
    programs = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    with ThreadPoolExecutor(programs) as pool:
        print(sum(pool.map(work, [sys.argv[1]] * programs)), "episodes played")
