"""Programs as they are, through a gateway: the openai client, an agent framework, plain HTTP."""

import asyncio
import contextlib
import http.client
import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.errors import UserError
from rl_async.gateway import Gateway, GatewayError, RemoteEpisode
from rl_async.launcher.cli.__main__ import main
from rl_async.messages import Version
from rl_async.process.http_auth import make_tokens, token_file
from rl_async.process.role import bind
from rl_async.process.run_files import Endpoints, write_endpoints
from tests.contracts.engines.engine_peers import running
from tests.contracts.gateway.peers import CALL, RunningGateway, gateway_process, make_model, serve_as_version_0
from tests.contracts.queue.peers import RunningQueue
from tests.support.queue import sync_client
from tests.support.rounding import PlainPass, assert_near

openai = pytest.importorskip("openai", reason="install the openai client: pip install openai")
pydantic = pytest.importorskip("pydantic", reason="install it: pip install pydantic")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def trained_text(renderer: ChatRenderer, row: Any) -> str:
    return renderer.decode(row.token_ids[row.loss_mask].tolist())


def test_the_openai_client_plays_an_episode_with_tools(start: Any, renderer: ChatRenderer) -> None:
    gateway = start("let me see " + CALL, "5")
    episode, client = gateway.openai()
    assert episode.task["ground_truth"] == "5" and episode.task["partition"] == "train"
    assert [tool["function"]["name"] for tool in episode.task["tools"]] == ["calculator"]
    messages = list(episode.task["prompt"])
    first = client.chat.completions.create(model="any", messages=messages, tools=episode.task["tools"], temperature=1)
    (call,) = first.choices[0].message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls" and first.choices[0].message.content == "let me see"
    assert (call.function.name, json.loads(call.function.arguments)) == ("calculator", {"expression": "2+3"})
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    second = client.chat.completions.create(model="any", messages=messages, tools=episode.task["tools"])
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("5", "stop")
    assert second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens
    assert [model.id for model in client.models.list()] == ["none"]
    assert episode.score() == {"accepted": True, "reason": "", "rows": 1, "reward": 1.0}
    ((row,),) = gateway.queue.rows
    assert trained_text(renderer, row) == f"let me see {CALL}<|im_end|>5<|im_end|>"
    assert second.usage.prompt_tokens + second.usage.completion_tokens == len(row.token_ids)


def test_streams_add_up_to_the_answer(start: Any, renderer: ChatRenderer) -> None:
    gateway = start("1+2", CALL)
    episode, client = gateway.openai()
    question = [{"role": "user", "content": "a?"}]
    with client.chat.completions.stream(model="any", messages=question) as stream:
        said = stream.get_final_completion().choices[0].message
    assert said.content == "1+2"
    more = [*question, {"role": "assistant", "content": said.content}, {"role": "user", "content": "b?"}]
    options = {"stream": True, "stream_options": {"include_usage": True}, "tools": [WEATHER]}
    chunks = list(client.chat.completions.create(model="any", messages=more, **options))
    (call,) = [c for chunk in chunks if chunk.choices for c in chunk.choices[0].delta.tool_calls or []]
    assert call.function.name == "calculator" and chunks[-1].usage.completion_tokens > 0
    episode.reward(0.5, tidy=1)
    (row,) = gateway.queue.rows[0]  # the template prints no tools
    assert trained_text(renderer, row) == f"1+2<|im_end|>{CALL}<|im_end|>" and row.reward_parts == {"tidy": 1.0}


def test_a_header_keeps_a_request_out_of_training(start: Any, renderer: ChatRenderer) -> None:
    gateway = start("1", "5")
    episode, client = gateway.openai()
    question = [{"role": "user", "content": "a?"}]
    for word in ("no", "yes"):
        client.chat.completions.create(model="any", messages=question, extra_headers={"X-RL-Async-Train": word})
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="any", messages=question, extra_headers={"X-RL-Async-Train": "maybe"})
    assert episode.heartbeat() and episode.deadline_s > 0
    assert episode.reward(0.5)["rows"] == 1 and not episode.heartbeat()
    assert trained_text(renderer, gateway.queue.rows[0][0]) == "5<|im_end|>"


def test_episodes_are_listed_and_ended_from_the_command_line(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = start("5")
    make_tokens(tmp_path / "keys")
    write_endpoints(tmp_path, Endpoints(queue="none", gateway=gateway.url))
    assert main(["gateway", "ls", str(tmp_path)]) == 0
    assert "0 episodes open" in capsys.readouterr().out
    episode, _ = gateway.openai()
    assert main(["gateway", "ls", str(tmp_path)]) == 0
    assert "7.0.1" in (said := capsys.readouterr().out) and episode.id not in said
    assert main(["gateway", "end", str(tmp_path), "7.0.1"]) == 0
    assert main(["gateway", "end", str(tmp_path), "7.0.1"]) == 2
    assert "7.0.1" in capsys.readouterr().err and len(gateway.queue.failures) == 1
    assert not episode.reward(1.0)["accepted"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_long_is_refused_before_its_end(start: Any, announced: bool) -> None:
    gateway = start("5")
    gateway.openai()  # it listens
    host, port = gateway.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.putrequest("POST", "/episodes")
    if announced:
        connection.putheader("Content-Length", str(1 << 40))
    else:
        connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    piece = b" " * (1 << 20)
    chunk = piece if announced else b"%x\r\n%s\r\n" % (len(piece), piece)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(9):
            connection.send(chunk)
    answer = connection.getresponse()
    assert answer.status == 413 and json.loads(answer.read())["error"]["code"] == "body_too_large"
    connection.close()


@pytest.mark.parametrize("path", ["/episodes", "/v1/chat/completions", "/v1/messages"])
def test_deeply_nested_json_is_refused(start: Any, path: str) -> None:
    gateway = start("5")
    episode, _ = gateway.openai()
    host, port = gateway.url.removeprefix("http://").split(":")
    place = path if path == "/episodes" else episode.base_url.removesuffix("/v1").partition(f":{port}")[2] + path
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.request("POST", place, b'{"messages": ' + b"[" * 100_000)
    answer = connection.getresponse()
    assert answer.status == 400, answer.read()
    connection.close()


def test_errors_are_those_that_the_client_knows(start: Any) -> None:
    gateway = start("5")
    episode, client = gateway.openai()
    question = [{"role": "user", "content": "a?"}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="any", messages=question, n=2)
    assert (refused.value.code, refused.value.param) == ("unsupported_value", "n")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "1+" * 3000}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(GatewayError, match="no_answers"):
        episode.reward(1.0)
    client.chat.completions.create(model="any", messages=question)
    assert episode.reward(1.0)["accepted"]
    assert (second := episode.reward(0.0))["reward"] == 1.0 and not second["accepted"]
    with pytest.raises(openai.NotFoundError, match="ended"):
        client.chat.completions.create(model="any", messages=question)
    assert gateway.queue.failures == []


@pytest.mark.parametrize("unsupported", ["ignore", "refuse"])
def test_other_sampling_is_dropped_and_counted_or_refused(
    start: Any, unsupported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = start("5", "6", unsupported=unsupported)
    episode, client = gateway.openai()
    question, asked = [{"role": "user", "content": "a?"}], {"temperature": 0, "seed": 5, "extra_body": {"top_k": 7}}
    if unsupported == "refuse":
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="any", messages=question, **asked)
        assert (refused.value.code, refused.value.param) == ("unsupported_value", "top_k")
    else:
        client.chat.completions.create(model="any", messages=question, **asked)
    client.chat.completions.create(model="any", messages=question)
    episode.reward(1.0)
    make_tokens(tmp_path / "keys")
    assert main(["gateway", "ls", str(tmp_path), "--url", gateway.url]) == 0
    assert ("top_k" in capsys.readouterr().out) == (unsupported == "ignore")
    assert gateway.queue.rows[0][0].sampling.temperature == 1.0
    found = {(client.partition("/")[0], field): count for (client, field), count in gateway.dropped().items()}
    name = "OpenAI"
    assert found == ({} if unsupported == "refuse" else {(name, "temperature"): 1, (name, "top_k"): 1})


def test_a_request_whose_client_hangs_up_leaves_no_trace(start: Any, renderer: ChatRenderer) -> None:
    gateway = start("", "5")
    episode, client = gateway.openai()
    question = [{"role": "user", "content": "a?"}]
    body = json.dumps({"messages": question})
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"))
    connection.request("POST", f"/episodes/{episode.id}/v1/chat/completions", body)
    assert gateway.engine.waiting.wait(10)
    connection.close()
    assert gateway.engine.cancelled.wait(10)
    client.chat.completions.create(model="any", messages=question)
    episode.reward(1.0)
    ((row,),) = gateway.queue.rows
    assert trained_text(renderer, row) == "5<|im_end|>"


def test_a_program_that_hangs_up_while_it_waits_takes_no_episode(start: Any) -> None:
    gateway = start("5", samples=2)
    first, _ = gateway.openai()
    second, client = gateway.openai()
    gone = http.client.HTTPConnection(gateway.url.removeprefix("http://"))
    gone.request("POST", "/episodes", '{"wait_s": 60}')
    gone.close()
    client.chat.completions.create(model="any", messages=[{"role": "user", "content": "a?"}])
    assert (second.reward(1.0)["accepted"], first.fail("no")["accepted"]) == (True, True)
    answer = Gateway(gateway.url).post("/episodes", {"wait_s": 0.1})
    assert answer == (503, {"finished": False})


def test_anthropic_messages(start: Any, renderer: ChatRenderer) -> None:
    gateway = start("so " + CALL, "5")
    episode, _ = gateway.openai()
    tools = [{"name": "calculator", "input_schema": {"type": "object"}}]
    messages: list[Any] = [{"role": "user", "content": "2+3?"}]

    def create() -> dict[str, Any]:
        path, body = f"/episodes/{episode.id}/v1/messages", {"model": "m", "max_tokens": 50, "messages": messages}
        status, answer = Gateway(gateway.url).post(path, body | {"tools": tools})
        assert status == 200, answer
        return answer

    first = create()
    assert first["stop_reason"] == "tool_use" and [block["type"] for block in first["content"]] == ["text", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "5"}
    messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    assert create()["content"] == [{"type": "text", "text": "5"}]
    episode.score()
    ((row,),) = gateway.queue.rows
    assert trained_text(renderer, row) == f"so {CALL}<|im_end|>5<|im_end|>" and row.reward == 1.0


async def test_a_framework_plays_an_episode_unchanged(start: Any, renderer: ChatRenderer) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="install it: pip install 'pydantic-ai-slim[openai]'")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    gateway = start(CALL, "the answer is 5", "bye")
    episode = next(Gateway(gateway.url).episodes())
    async with openai.AsyncOpenAI(base_url=episode.base_url, api_key="none", max_retries=0) as client:
        model = OpenAIChatModel("any", provider=OpenAIProvider(openai_client=client))
        agent = pydantic_ai.Agent(model, system_prompt="be brief")
        asked: list[str] = []

        @agent.tool_plain
        def calculator(expression: str) -> str:
            """Evaluate arithmetic."""
            asked.append(expression)
            return "5"

        first = await agent.run("what is 2+3?")
        second = await agent.run("bye", message_history=first.all_messages())
    assert (first.output, second.output, asked) == ("the answer is 5", "bye", ["2+3"])
    episode.reward(1.0)
    ((row,),) = gateway.queue.rows  # one history, so one row
    assert trained_text(renderer, row) == f"{CALL}<|im_end|>the answer is 5<|im_end|>bye<|im_end|>"


def test_what_a_real_engine_sampled_reaches_the_queue_as_it_was(
    tokenizer: PreTrainedTokenizerFast, renderer: ChatRenderer, closed_run: tuple[Path, RunningQueue], tmp_path: Path
) -> None:
    model, (run, queue) = make_model(tmp_path / "model", tokenizer), closed_run
    with running("embedded", model, run, model_length=256) as engine:
        asyncio.run(serve_as_version_0(engine))
        with sync_client(run, queue.address, "operator") as operator:
            operator.register_engine("e0", engine.url, "embedded")
        with sync_client(run, queue.address, "trainer") as trainer:
            trainer.publish(Version(0, 0), ["e0"])
            with gateway_process(run, model, queue.address) as url:
                gateway = Gateway(url, token_file=token_file(run, "gateway"))
                said = [play(episode) for _, episode in zip(range(4), gateway.episodes())]
            batch = trainer.reserve(0, 10.0)
            rows = trainer.fetch([header.key for header in batch.headers])
    assert [header.key for header in batch.headers] == [
        (group, sample, segment) for group in (0, 1) for sample in (0, 1) for segment in (0, 1)
    ]
    weights = AutoModelForCausalLM.from_pretrained(model)
    for row in rows:
        assert {run.version for run in row.versions} == {Version(0, 0)} and row.reward == 0.25
        check_logprobs(weights, row)
    sampled = [trained_text(renderer, row) for row in rows]
    for (first, second, branch), whole, other in zip(said, sampled[::2], sampled[1::2], strict=True):
        assert whole.replace("<|im_end|>", "") == (first + second).replace("<|im_end|>", "")
        assert other.replace("<|im_end|>", "") == branch.replace("<|im_end|>", "")


def play(episode: RemoteEpisode) -> tuple[str, str, str]:
    """Two turns and a branch of the second, which must be a call; what was said in each."""
    with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0) as client:

        def ask(*texts: str, **options: Any) -> str:
            messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
            return client.chat.completions.create(model="any", messages=messages, **options).choices[0].message.content

        first = ask("what is 2+3?")
        second = ask("what is 2+3?", first, "and 4?")
        call = ask("what is 2+3?", first, "and 5?", tools=[WEATHER], tool_choice="required")
    assert call.startswith("<tool_call>"), "a broken one is text"
    said = first, second, call.removeprefix("<tool_call>")
    assert episode.reward(0.25) == {"accepted": True, "reason": "", "rows": 2, "reward": 0.25}
    return said


def check_logprobs(model: Any, row: Any) -> None:
    """The recorded log-probabilities are the model's on the recorded tokens."""
    ids = torch.tensor(row.token_ids.astype(np.int64))
    exact, allowed = PlainPass(model).logprobs(ids.tolist())
    expected = exact[:-1].gather(1, ids[1:, None])[:, 0]
    # A copy, since PyTorch warns of a mask that it could not write to: the row lies in the message that brought it.
    sampled = row.loss_mask[1:].copy()
    assert_near(torch.tensor(row.logprobs[1:][sampled]), expected[sampled], allowed)
    assert not row.logprobs[1:][~sampled].any()


def test_a_port_that_is_taken_is_a_user_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match=r"agent\.gateway"):
        bind("127.0.0.1", taken.getsockname()[1], "agent.gateway")
    with pytest.raises(UserError, match=r"agent\.gateway"):
        bind("127.0.0.1", 1 << 16, "agent.gateway")


def test_a_gateway_that_is_gone_has_ended_with_its_run(start: Any) -> None:
    gateway = start("5", samples=2)
    door = Gateway(gateway.url, gone_s=0)
    episodes = door.episodes()
    episode = next(episodes)
    unknown = RemoteEpisode("guessed", "", {}, door).reward(1.0)
    assert unknown == {"accepted": False, "reason": "the episode has ended", "rows": 0, "reward": None}
    gateway.stop()
    assert episode.fail("late")["accepted"] is False and list(episodes) == []


def test_the_client_says_when_there_is_no_gateway() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(OSError, match="no gateway"):
        next(Gateway(f"http://127.0.0.1:{port}", start_s=0).episodes())


# OpenAI's Responses dialect, with OpenAI's client and its types as the judge.


PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
CALCULATOR = {"type": "function", "name": "calculator", "description": "Evaluate.", "parameters": PARAMETERS}
END = "<|im_end|>"


def trained(gateway: RunningGateway, renderer: ChatRenderer) -> list[str]:
    (rows,) = gateway.queue.rows
    return [renderer.decode(row.token_ids[row.loss_mask].tolist()) for row in rows]


def ask(gateway: RunningGateway, episode: RemoteEpisode, **body: Any) -> tuple[int, dict[str, Any]]:
    return Gateway(gateway.url).post(f"/episodes/{episode.id}/v1/responses", {"model": "m", **body})


def check(response: Any) -> None:
    """The response is one by the strict reading of the client's types."""
    openai.types.responses.Response.model_validate(response.model_dump(mode="json", warnings=False))


@pytest.mark.parametrize("way", ["items", "previous", "stateless"])
def test_a_tool_loop_is_one_row(start: Any, renderer: ChatRenderer, way: str) -> None:
    gateway = start("let me see " + CALL, "5")
    episode, client = gateway.openai()
    common: dict[str, Any] = {"model": "any", "instructions": "be brief", "tools": [CALCULATOR]}
    if way == "stateless":
        common |= {"store": False, "include": ["reasoning.encrypted_content"]}
    first = client.responses.create(input="2+3?", **common)
    check(first)
    text, call = first.output
    assert (text.content[0].text, call.name, first.status) == ("let me see", "calculator", "completed")
    assert json.loads(call.arguments) == {"expression": "2+3"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    if way == "previous":
        second = client.responses.create(input=[result], previous_response_id=first.id, **common)
    else:
        said = [item.model_dump(mode="json", exclude_none=True) for item in first.output]
        second = client.responses.create(input=[{"role": "user", "content": "2+3?"}, *said, result], **common)
    check(second)
    assert second.output_text == "5"
    assert episode.reward(1.0)["rows"] == 1
    assert trained(gateway, renderer) == [f"let me see {CALL}{END}5{END}"]
    ((row,),) = gateway.queue.rows
    assert second.usage.input_tokens + second.usage.output_tokens == second.usage.total_tokens == len(row.token_ids)


def test_chat_and_responses_print_the_same_tokens(start: Any, renderer: ChatRenderer) -> None:
    gateway = start(CALL, "5")
    episode, client = gateway.openai()
    function = {"name": "calculator", "description": "Evaluate.", "parameters": PARAMETERS}
    messages: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+3?"}]
    tools = [{"type": "function", "function": function}]
    first = client.chat.completions.create(model="any", messages=messages, tools=tools)
    call = first.choices[0].message.tool_calls[0]
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"role": "user", "content": "2+3?"},
        {"type": "function_call", "call_id": "x", "name": "calculator", "arguments": call.function.arguments},
        {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_text", "text": "5"}]},
    ]
    client.responses.create(model="any", input=items, tools=[CALCULATOR])
    episode.reward(1.0)
    # The dialects may even be mixed.
    assert trained(gateway, renderer) == [f"{CALL}{END}5{END}"]


@pytest.mark.parametrize("store", [True, False])
def test_items_may_be_named(start: Any, renderer: ChatRenderer, store: bool) -> None:
    gateway = start(CALL, "5")
    episode, client = gateway.openai()
    first = client.responses.create(model="any", input="2+3?", tools=[CALCULATOR], store=store)
    named = [
        {"role": "user", "content": "2+3?"},
        {"type": "item_reference", "id": first.output[0].id},
        {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "5"},
    ]
    if not store:
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="any", input=named, tools=[CALCULATOR])
        assert refused.value.param == "input"
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="any", input="x", previous_response_id=first.id)
        assert refused.value.code == "previous_response_not_found"
        return
    client.responses.create(model="any", input=named, tools=[CALCULATOR])
    episode.reward(1.0)
    assert trained(gateway, renderer) == [f"{CALL}{END}5{END}"]


def test_reasoning_goes_out_and_comes_back(start: Any, thinking: ChatRenderer) -> None:
    gateway = start("<think>two and three</think>" + CALL, "<think>so</think>5", "6", chat=thinking)
    episode, client = gateway.openai()
    common: dict[str, Any] = {"model": "any", "tools": [CALCULATOR], "store": False}
    common["include"] = ["reasoning.encrypted_content"]
    history: list[Any] = [{"role": "user", "content": "2+3?"}]
    first = client.responses.create(input=history, **common)
    check(first)
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    assert first.output[0].content[0].text == "two and three"
    for item in first.output:
        # SDKs do this, too.
        history.append(item.model_dump(mode="json", exclude_none=True, exclude={"content"}))
    history.append({"type": "function_call_output", "call_id": first.output[1].call_id, "output": "5"})
    second = client.responses.create(input=history, **common)
    history += [item.model_dump(mode="json", exclude_none=True) for item in second.output]
    assert [item.type for item in second.output] == ["reasoning", "message"]
    client.responses.create(input=[*history, {"role": "user", "content": "and one more?"}], **common)
    episode.reward(1.0)
    assert trained(gateway, thinking) == [f"<think>two and three</think>{CALL}{END}<think>so</think>5{END}6{END}"]


def test_an_answer_that_is_cut_is_incomplete(start: Any) -> None:
    _, client = start("1+2+3+4+5+6+7+8+9").openai()
    cut = client.responses.create(model="any", input="x", max_output_tokens=3)
    check(cut)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.usage.output_tokens == 3


def test_functions_in_a_namespace(start: Any, renderer: ChatRenderer) -> None:
    said = '<tool_call>{"name": "agents__spawn", "arguments": {}}</tool_call>'
    gateway = start(said, "done")
    episode, client = gateway.openai()
    spawn = {"type": "function", "name": "spawn", "description": "", "strict": False, "parameters": {"type": "object"}}
    tools: list[Any] = [{"type": "web_search", "external_web_access": False}]
    tools += [{"type": "namespace", "name": "agents", "description": "Agents.", "tools": [spawn]}]
    first = client.responses.create(model="any", input="go", tools=tools)
    (call,) = first.output
    assert (call.namespace, call.name) == ("agents", "spawn")
    back = [call.model_dump(mode="json", exclude_none=True)]
    back.append({"type": "function_call_output", "call_id": call.call_id, "output": "ok"})
    client.responses.create(model="any", input=[{"role": "user", "content": "go"}, *back], tools=tools)
    episode.reward(1.0)
    assert trained(gateway, renderer) == [f"{said}{END}done{END}"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "computer_call_output", "call_id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "arguments": "{}", "call_id": "x"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "[1]", "call_id": "x"}]}, "input[0].arguments"),
        ({"input": "x", "tools": [{"type": "custom", "name": "f"}]}, "tools"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
    ],
)
def test_what_cannot_be_served_is_refused(start: Any, body: dict[str, Any], param: str) -> None:
    gateway = start("5")
    episode, _ = gateway.openai()
    status, answer = ask(gateway, episode, **body)
    assert (status, answer["error"]["param"]) == (400, param)


def events_of(stream: Any) -> list[dict[str, Any]]:
    """The events, each read strictly by the client's types."""
    reader = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
    found = [event.model_dump(mode="json", warnings=False) for event in stream]
    for event in found:
        assert reader.validate_python(event).type == event["type"]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
REASONING = [kind.replace("output_text", "reasoning_text") for kind in TEXT]
ARGUMENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
ITEM_DONE = ["output_item.done"]


def test_the_sequence_of_events(start: Any, thinking: ChatRenderer) -> None:
    gateway = start(f"<think>hm</think>see {CALL}", "<think>hm</think>5", chat=thinking)
    _, client = gateway.openai()
    stream = client.responses.create(model="any", input="2+3?", tools=[CALCULATOR], stream=True)
    found = events_of(stream)
    kinds = [event["type"].removeprefix("response.") for event in found]
    # The text may come in pieces.
    together = [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]]
    items = [*REASONING, *ITEM_DONE, *TEXT, *ITEM_DONE, *ARGUMENTS, *ITEM_DONE]
    assert together == ["created", "in_progress", *items, "completed"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == found[-1]["response"]["output"] and len(done) == 3
    with client.responses.stream(model="any", input="2+3?", tools=[CALCULATOR]) as helped:
        events = list(helped)
        final = helped.get_final_response()
    assert (final.output_text, events[-1].type) == ("5", "response.completed")


def test_a_cut_answer_ends_its_stream_as_incomplete(start: Any) -> None:
    _, client = start("1+2+3+4+5+6+7+8+9").openai()
    found = events_of(client.responses.create(model="any", input="x", max_output_tokens=3, stream=True))
    assert found[-1]["type"] == "response.incomplete"
    assert [e["item"]["status"] for e in found if e["type"] == "response.output_item.done"] == ["incomplete"]


def test_parse_reads_the_arguments_of_strict_functions(start: Any) -> None:
    class calculator(pydantic.BaseModel):
        """Evaluate."""

        expression: str

    _, client = start(CALL).openai()
    found = client.responses.parse(
        model="any", input="2+3?", tools=[openai.pydantic_function_tool(calculator)["function"] | {"type": "function"}]
    )
    assert found.output[0].parsed_arguments is not None
