"""Held-out episodes that fail count in each way of evaluating, and the ways agree."""

import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.small_runs import HARDLY_WARM, RL_ASYNC, SMALL, succeed

# The episodes of every fourth task never end, and those of the tasks after them are worth 0.
CODE = """
import asyncio

async def stands_still(episode):
    if episode.task.extra["index"] % 4 == 0:
        await asyncio.sleep(3600)
    return await episode.generate()

def by_row(extra_info):
    return float(extra_info["index"] % 4 != 1)
"""
TASKS, SAMPLES = 8, 2
EVALUATED = [
    "agent.loop=held_out.py:stands_still",
    "agent.episode_timeout_s=10",
    "queue.max_attempts=2",
    "reward.functions=[{name: 'held_out.py:by_row'}]",
    "data.eval_path=held_out.jsonl",
    f"eval.tasks={TASKS}",
    f"eval.samples={SAMPLES}",
    "rollout.max_tokens=8",
]


class Served(BaseHTTPRequestHandler):
    """A model that always says the same."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": "4"}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choices = [{"index": 0, "finish_reason": "stop", "message": message}]
        body = json.dumps({**answer, "choices": choices, "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_ways_agree_where_a_quarter_of_the_episodes_run_out_of_time(workplace: Path, endpoint: str) -> None:
    (workplace / "held_out.py").write_text(CODE)
    asked = {
        "prompt": [{"role": "user", "content": "2+2"}],
        "reward_model": {"ground_truth": "4"},
        "data_source": "own",
    }
    rows = [json.dumps({**asked, "extra_info": {"index": index}}) for index in range(TASKS)]
    (workplace / "held_out.jsonl").write_text("\n".join(rows))

    launched = [*SMALL, *EVALUATED, "trainer.steps=1", "eval.every=1", "eval.before=true"]
    succeed(workplace, "launch", "--config", "calculator", "--name", "run", *launched, timeout_s=400)
    lines = (workplace / "runs/run/evaluations.jsonl").read_text().splitlines()
    assert len(lines) == 2
    for line in map(json.loads, lines):
        assert (line["eval/failed"], line["eval/trajectories"]) == (4.0, 16.0)
        assert (line["eval/own/tasks"], line["eval/own/samples"]) == (8.0, 2.0)
        assert (line["eval/reward"], line["eval/own/avg"], line["eval/own/pass@1"]) == (0.5, 0.5, 0.5)

    config = ["eval", "--config", "calculator", *HARDLY_WARM, *EVALUATED, "--jsonl", "episodes.jsonl"]
    for where in ([], ["--endpoint", endpoint, "--model", "m"]):
        # Not `succeed`: this command starts the processes that score what an endpoint answers, and they are not forked.
        command = [RL_ASYNC, *config, *where]
        told = subprocess.run(command, cwd=workplace, text=True, capture_output=True, check=True, timeout=400).stdout
        assert "4 of 16 episodes could not be scored" in told
        episodes = [json.loads(line) for line in (workplace / "episodes.jsonl").read_text().splitlines()]
        assert len(episodes) == 16 and sum(not each["scored"] for each in episodes) == 4
        assert sum(each["reward"] for each in episodes) == 8.0
        (source,) = json.loads(succeed(workplace, "compare", "runs/run@1", "episodes.jsonl", "--json"))["sources"]
        assert (source["tasks"], source["change"][0], source["better"], source["worse"]) == (8, 0.0, 0, 0)
