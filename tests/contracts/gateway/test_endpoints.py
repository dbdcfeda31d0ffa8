"""The gateway's smaller endpoints, its client without the project's dependencies, and `rl-async eval` against it."""

import ast
import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rl_async
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.gateway.server import TRAIN
from rl_async.configs.load import load_config
from rl_async.configs.schema.rollout import EndpointConfig
from rl_async.gateway import Gateway
from rl_async.launcher.runs.evaluate import HeldOutSamples, play
from tests.contracts.gateway.peers import RunningGateway
from tests.unit.agent_loop.fakes import leased

END = "<|im_end|>"
USER = {"role": "user", "content": "a?"}


def ask(gateway: RunningGateway, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """Status, JSON and headers of an answer under the episode's path."""
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=60)
    place = f"/episodes/{gateway.taken()}{path}"
    connection.request(method, place, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    read = json.loads(answer.read())
    connection.close()
    return answer.status, read, answer.headers


def test_both_base_urls_are_returned(start: Any) -> None:
    gateway = start("5")
    episode = gateway.taken()
    assert gateway.begun["base_url"] == f"{gateway.url}/episodes/{episode}/v1"
    assert gateway.begun["anthropic_base_url"] == f"{gateway.url}/episodes/{episode}"


@pytest.mark.parametrize("prefix", ["/v1", "/v1/v1"])
def test_a_doubled_v1_is_accepted(start: Any, prefix: str) -> None:
    gateway = start("5")
    status, answer, _ = ask(gateway, "POST", f"{prefix}/messages", {"messages": [USER], "max_tokens": 9})
    assert (status, answer["content"]) == (200, [{"type": "text", "text": "5"}])


def test_tokens_are_counted_as_they_are_used(start: Any) -> None:
    gateway = start("5")
    asked = {"messages": [USER], "system": "be brief", "model": "m"}
    status, counted, _ = ask(gateway, "POST", "/v1/messages/count_tokens", asked)
    _, answer, _ = ask(gateway, "POST", "/v1/messages", asked | {"max_tokens": 9})
    assert (status, counted) == (200, {"input_tokens": answer["usage"]["input_tokens"]})
    status, counted, _ = ask(
        gateway, "POST", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "1+" * 3000}]}
    )
    assert status == 200 and counted["input_tokens"] > 3000  # more than fit; nothing is sampled
    gateway.end()
    assert [len(rows) for rows in gateway.queue.rows] == [1]


@pytest.mark.parametrize("train", ["yes", "no"])
def test_while_an_episode_is_being_ended_each_client_is_refused_in_its_own_way(start: Any, train: str) -> None:
    gateway = start("5")
    ask(gateway, "POST", "/v1/chat/completions", {"messages": [USER]})
    gateway.queue.takes.clear()
    ending = threading.Thread(target=gateway.end)
    ending.start()
    try:
        assert gateway.queue.putting.wait(60)
        for path, body in {
            "/v1/chat/completions": {"messages": [USER], "stream": True},
            "/v1/responses": {"input": "a?"},
            "/v1/completions": {"prompt": "a?"},
            "/v1/messages": {"messages": [USER], "max_tokens": 9, "stream": True},
        }.items():
            status, answer, _ = ask(gateway, "POST", path, body, **{TRAIN: train})
            error, anthropic = answer["error"], path == "/v1/messages"
            code = error["details"]["error_code"] if anthropic else error["code"]
            assert (status, code, "type" in answer) == (404, "episode_ended", anthropic)
    finally:
        gateway.take_rows()
        ending.join(60)
    assert [len(rows) for rows in gateway.queue.rows] == [1] and len(gateway.engine.scripted.requests) == 1


@pytest.mark.parametrize("name", ["gpt-5", "some/model"])
def test_any_model_is_there(start: Any, name: str) -> None:
    gateway = start("5")
    assert ask(gateway, "GET", f"/v1/models/{name}")[1]["id"] == name
    theirs = {"anthropic-version": "2023-06-01"}
    assert ask(gateway, "GET", f"/v1/models/{name}", **theirs)[1]["type"] == "model"
    assert ask(gateway, "GET", "/v1/models", **theirs)[1]["has_more"] is False


def test_each_bare_prompt_is_a_row(start: Any, renderer: ChatRenderer) -> None:
    gateway = start("1+2", "3", "4", "5")
    status, first, _ = ask(gateway, "POST", "/v1/completions", {"prompt": "<|im_start|>x", "max_tokens": 50})
    assert (status, first["choices"][0]["text"], first["choices"][0]["finish_reason"]) == (200, "1+2", "stop")
    ids = renderer.encode("<|im_start|>x")
    assert first["usage"]["prompt_tokens"] == len(ids)
    ask(gateway, "POST", "/v1/completions", {"prompt": ids})
    ask(gateway, "POST", "/v1/completions", {"prompt": ["<|im_start|>x"]})
    ask(gateway, "POST", "/v1/chat/completions", {"messages": [{"role": "assistant", "content": "3"}, USER]})
    gateway.end()
    (rows,) = gateway.queue.rows
    assert [row.token_ids[: len(ids)].tolist() for row in rows[:3]] == [ids] * 3
    said = [renderer.decode(row.token_ids[row.loss_mask].tolist()) for row in rows]
    assert said == [f"1+2{END}", f"3{END}", f"4{END}", f"5{END}"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "1+" * 3000}, "prompt"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(start: Any, body: dict[str, Any], param: str) -> None:
    status, answer, _ = ask(start("5"), "POST", "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/v1/embeddings", "embedding"),
        ("/v1beta/models/gemini:streamGenerateContent", "Gemini"),
        ("/chat/completions", "/v1"),
        ("/v1/responses/resp_1/cancel", "previous_response_id"),
        ("/v1/audio/speech", "text"),
        ("/v1/messages/batches", "one by one"),
        ("/v1/anything", "chat/completions"),
    ],
)
def test_other_paths_say_what_to_use(start: Any, path: str, word: str) -> None:
    status, answer, _ = ask(start("5"), "POST", path, {})
    assert status == 404 and word in answer["error"]["message"]
    assert ("type" in answer) == ("messages" in path)  # as Anthropic's errors


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/chat/completions", "POST"), ("DELETE", "/v1/responses", "POST"), ("POST", "/v1/models", "GET")],
)
def test_wrong_methods_name_the_right_one(start: Any, method: str, path: str, allowed: str) -> None:
    status, answer, headers = ask(start("5"), method, path)
    assert status == 405 and allowed in headers["Allow"] and allowed in answer["error"]["message"]


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>'


async def test_an_open_episode_can_be_evaluated(start: Callable[..., RunningGateway], tmp_path: Path) -> None:
    gateway = start("OK", CALL, "5")
    episode = next(Gateway(gateway.url).episodes())
    config = load_config("calculator")
    samples = HeldOutSamples([leased().task], config)
    endpoint = EndpointConfig(url=episode.base_url, model="any", attempts=1)
    await play(config, endpoint, samples, tmp_path / "run")
    (row,) = samples.rows
    assert (row.reward, [turn.role for turn in row.turns]) == (1.0, ["user", "assistant", "tool", "assistant"])
    assert row.turns[1].tool_calls[0].result == "5"


CODE = """
import sys
sys.path.insert(0, sys.argv[1])
from rl_async.gateway import Gateway, RemoteEpisode
standard = sys.stdlib_module_names | {"__main__"}
print(sorted(name for name in sys.modules if name.partition(".")[0] not in standard))
"""


def test_the_client_needs_the_standard_library_only() -> None:
    """-I -S: without the environment's variables, the working directory and site-packages."""
    place = str(Path(rl_async.__file__).parents[1])
    done = subprocess.run([sys.executable, "-I", "-S", "-c", CODE, place], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {name.partition(".")[0] for name in ast.literal_eval(done.stdout)} == {"rl_async"}
