"""The gateway's smaller endpoints, its client without the project's dependencies, and `rl-async eval` against it."""

import ast
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import rl_async
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.gateway.server import TRAIN
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.configs.derived import follows_json_schemas
from rl_async.configs.engines import ENGINES, EngineKind
from rl_async.configs.load import dump, load_config
from rl_async.configs.schema.rollout import EndpointConfig, GatewayConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_SIGNAL, ConfigError
from rl_async.gateway import Gateway
from rl_async.launcher.plan.trials import try_environment
from rl_async.launcher.runs.evaluate import HeldOutSamples, play
from rl_async.process.http_auth import make_tokens
from tests.contracts.gateway.peers import CALL, RunningGateway
from tests.support.forked import fork
from tests.unit.agent_loop.conftest import demos
from tests.unit.agent_loop.fakes import leased, run_config
from tests.unit.rollout_server.test_pool import TOO_LARGE

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


# Schemas that crash grammar libraries, sent to a gateway in a process of its own, whatever the engines are.


QUESTION = [{"role": "user", "content": "which colour?"}]
FOLLOWING = [kind for kind in get_args(EngineKind) if ENGINES[kind].json_schemas]


def bodies(schema: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Requests for answers to a schema: by the schema's place, the path and the body."""
    named = {"type": "json_schema", "name": "x", "schema": schema}
    return {
        "response_format.json_schema.schema": (
            "chat/completions",
            {"messages": QUESTION, "response_format": {"type": "json_schema", "json_schema": named}},
        ),
        "text.format.schema": ("responses", {"input": "which?", "text": {"format": named}}),
        "output_config.format.schema": (
            "messages",
            {"messages": QUESTION, "max_tokens": 9, "output_config": {"format": named}},
        ),
    }


def send_all(kind: EngineKind) -> None:
    """Send each schema in each dialect; every answer must be a 400 that names the place."""
    config = run_config(
        {"engine": kind, "max_tokens": 50, "max_model_len": 2000}, gateway=GatewayConfig(unsupported="ignore")
    )
    gateway = RunningGateway(config, leased(), ChatRenderer(train_tokenizer(demos("calculator", 300), 200)), ["5"])
    try:
        episode = next(Gateway(gateway.url).episodes())
        for schema, _ in TOO_LARGE.values():
            for place, (path, body) in bodies(schema).items():
                url = f"{gateway.url}/episodes/{episode.id}/v1/{path}"
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=60)
                told = json.load(refused.value)["error"]
                assert refused.value.code == 400 and told["message"].startswith(f"{place}: "), told
        assert gateway.dropped() == {}
        assert gateway.engine.scripted.requests == []
    finally:
        gateway.stop()


@pytest.mark.parametrize("kind", FOLLOWING)
def test_schemas_that_are_too_large_are_refused_by_their_place(kind: EngineKind) -> None:
    package = ENGINES[kind].json_package
    if package and find_spec(package) is None:
        pytest.skip("no masks of tokens here; install them: pip install 'rl-async[json]'")
    sending = fork(send_all, kind)
    sending.join(180)
    assert sending.exitcode == 0


# The requests of agent programs as they are shipped, in the shape in which they were recorded or seen.
#
# `recorded_clients.json` has what each program sent, with all texts and schemas replaced, what the policy said, how
# many rows that makes, and which fields were ignored: those of JSON formats only where engines cannot follow them.


RECORDED = json.loads((Path(__file__).parent / "recorded_clients.json").read_text())


def post(url: str, body: dict[str, Any], agent: str) -> str:
    headers = {"Content-Type": "application/json", "User-Agent": agent}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("recorded", RECORDED, ids=[client["client"] for client in RECORDED])
def test_what_a_client_sends_is_accepted_and_recorded(renderer: ChatRenderer, recorded: dict[str, Any]) -> None:
    config = run_config({"max_tokens": 100, "max_model_len": 4000}, max_tokens=3000)
    gateway = RunningGateway(config, leased(), renderer, recorded["says"])
    try:
        client_play(gateway, recorded)
    finally:
        gateway.stop()
    (rows,) = gateway.queue.rows
    trained = [renderer.decode(row.token_ids[row.loss_mask].tolist()) for row in rows]
    assert "".join(trained) == "".join(f"{said}<|im_end|>" for said in recorded["says"])
    assert len(rows) == recorded["rows"]
    formats = [] if follows_json_schemas(config) else recorded.get("formats", [])
    assert gateway.dropped().keys() == {(recorded["user_agent"], field) for field in recorded["ignored"] + formats}


def client_play(gateway: RunningGateway, recorded: dict[str, Any]) -> None:
    """Send the requests in one episode, and check that the answers are whole."""
    episode = next(Gateway(gateway.url).episodes())
    for body in recorded["requests"]:
        text = post(f"{gateway.url}/episodes/{episode.id}/v1/{recorded['path']}", body, recorded["user_agent"])
        end = "message_stop" if recorded["path"] == "messages" else "[DONE]"
        assert end in text if body.get("stream") else msgspec.json.decode(text)
    assert episode.reward(1.0)["accepted"]


SCHEMA = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
    "additionalProperties": False,
}
CLIENT_CALL = '<tool_call>{"name": "%s", "arguments": {"expression": "2+3"}}</tool_call>'

Item = dict[str, Any]


def agents(history: list[Item]) -> Item:
    """What openai-agents sends."""
    tool = {"name": "calculator", "parameters": SCHEMA | {"title": "calculator_args"}, "strict": True}
    return {
        "model": "policy",
        "include": [],
        "input": [{"content": "2+3?", "role": "user"}, *history],
        "instructions": "be brief",
        "tools": [tool | {"type": "function", "description": "evaluate."}],
    }


def ai_sdk(history: list[Item]) -> Item:
    """What the AI SDK sends: of earlier answers neither ids nor status, and arguments without spaces."""
    question = {"role": "user", "content": [{"type": "input_text", "text": "2+3?"}]}
    kept = ("type", "call_id", "name", "arguments", "output")
    sent = [{key: item[key] for key in kept if key in item} for item in history]
    for item in sent:
        if "arguments" in item:
            item["arguments"] = json.dumps(json.loads(item["arguments"]), separators=(",", ":"))
    tool = {"type": "function", "name": "calculator", "description": "evaluate.", "parameters": SCHEMA}
    return {"model": "policy", "input": [question, *sent], "tools": [tool], "tool_choice": "auto"}


def codex(history: list[Item]) -> Item:
    """What Codex sends: a stream without a store, functions in a namespace, a search of OpenAI's."""

    def said(role: str, *texts: str) -> Item:
        parts = [{"type": "input_text", "text": text} for text in texts]
        return {"type": "message", "id": f"msg_{role}", "role": role, "content": parts}

    def function(name: str) -> Item:
        return {"type": "function", "name": name, "description": "", "strict": False, "parameters": SCHEMA}

    agents = {"type": "namespace", "name": "agents", "description": "", "tools": [function("calculator")]}
    return {
        "model": "policy",
        "stream": True,
        "input": [
            said("developer", "be brief"),
            said("developer", "skills", "sandbox"),
            said("user", "where it runs"),
            said("user", "2+3?"),
            *history,
        ],
        "tools": [function("exec"), agents, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "x",
        "client_metadata": {"turn_id": "x"},
    }


def answered(gateway: RunningGateway, body: Item) -> list[Item]:
    """The output items of the answer."""
    path = f"/episodes/{gateway.taken()}/v1/responses"
    if not body.get("stream"):
        status, answer = Gateway(gateway.url).post(path, body)
        assert status == 200, answer
        return list(answer["output"])
    return streamed(gateway, path, body)


def streamed(gateway: RunningGateway, path: str, body: Item) -> list[Item]:
    request = urllib.request.Request(gateway.url + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: ")]
    assert events[-1]["type"] == "response.completed"
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


@pytest.mark.parametrize(
    ("request_of", "function"), [(agents, "calculator"), (ai_sdk, "calculator"), (codex, "agents__calculator")]
)
def test_a_tool_loop_is_one_row(start: Any, renderer: ChatRenderer, request_of: Any, function: str) -> None:
    gateway = start(CLIENT_CALL % function, "5")
    (call,) = answered(gateway, request_of([]))
    assert call["name"] == "calculator"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    (said,) = answered(gateway, request_of([call, result]))
    assert said["content"][0]["text"] == "5"
    gateway.end()
    (rows,) = gateway.queue.rows
    texts = [renderer.decode(row.token_ids[row.loss_mask].tolist()) for row in rows]
    assert texts == [f"{CLIENT_CALL % function}{END}5{END}"]


# An environment of verifiers 0.4, which plays through a gateway in a Python of its own.


ROOT = Path(__file__).parents[3]
VARIABLE = "RL_ASYNC_VERIFIERS_PYTHON"
PYTHON = Path(os.environ.get(VARIABLE, ROOT / ".venv-verifiers/bin/python"))
MODULES = ROOT / "tests/contracts/environments/modules"
# Where verifiers finds environments by name.
FOUND = {"PYTHONPATH": str(MODULES)}
KEEPER = "rl_async.agent_loop.environments.player"
MISSING = f"no verifiers 0.4 to play; install it with scripts/install verifiers ({VARIABLE})"
# verifiers takes seconds to import, on a busy machine a minute.

VERIFIERS_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    command = [str(PYTHON), "-m", f"{KEEPER}.verifiers", "write", "adding-env", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300, env=os.environ | FOUND)
    written: dict[str, Any] = json.loads(path.read_text())
    return written


@pytest.fixture
def config(row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    for name, value in FOUND.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    options = "{taskset: {system_text: Add them.}, agent: {runtime: {type: subprocess}}}"
    given = [f"data.path={tmp_path}/rows.jsonl", "data.eval_path=null", "data.make=null", "eval.every=0"]
    given += ["agent.gateway={}", "agent.environment=verifiers:adding-env", f"agent.environment_options={options}"]
    given += [f"agent.environment_hosts={{python: {PYTHON}}}", "agent.concurrency=1", "agent.max_tokens=3000"]
    given += ["agent.tools=[]", "rollout.max_model_len=4000", "rollout.max_tokens=100"]

    def made(*overrides: str) -> RunConfig:
        return load_config("calculator", [*given, *overrides])

    return made


SUBPROCESS = "agent: {runtime: {type: subprocess}}"
SEVERAL = (
    "agent.environment=verifiers:hard,adding-env",
    f"agent.environment_options={{hard: {{taskset: {{id: adding-env}}, {SUBPROCESS}}}, adding-env: {{{SUBPROCESS}}}}}",
)


@pytest.mark.skipif(not PYTHON.is_file(), reason=MISSING)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("overrides", [(), SEVERAL], ids=["one", "several"])
def test_its_rollouts_become_rows_with_its_rewards(
    config: Callable[..., RunConfig],
    row: dict[str, Any],
    renderer: ChatRenderer,
    tmp_path: Path,
    overrides: tuple[str, ...],
) -> None:
    run = config(*overrides)
    (tmp_path / "config.yaml").write_text(dump(run))
    make_tokens(tmp_path / "keys")
    says = (VERIFIERS_CALL, "5", "4", "give up", "raise")
    gateway = RunningGateway(run, leased(samples=4, extra=row["extra_info"]), renderer, says)
    command = [sys.executable, "-m", KEEPER, "--run", str(tmp_path), "--gateway", gateway.url, "--index", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as keeper:
        assert keeper.stderr is not None
        said = ""
        while "given back" not in said and (line := keeper.stderr.readline()):
            said += line
        keeper.terminate()
        said += keeper.communicate(timeout=60)[1]
    gateway.stop()
    assert keeper.returncode == EXIT_SIGNAL + signal.SIGTERM, said
    assert "no number" in gateway.queue.failures[0]
    right, wrong, error = [rows[0] for rows in gateway.queue.rows]
    assert (right.reward, right.reward_parts) == (1.5, {"right": 1.0, "called": 1.0, "turns": 2.0})
    assert (wrong.reward, wrong.reward_parts) == (0.0, {"right": 0.0, "called": 0.0, "turns": 1.0})
    assert error.reward == 0.0 and error.error
    assert [turn.role for turn in right.turns] == ["system", "user", "assistant", "tool", "assistant"]


@pytest.mark.skipif(not PYTHON.is_file(), reason=MISSING)
@pytest.mark.timeout(600)
def test_one_of_several_has_its_own_options_and_rows(config: Callable[..., RunConfig], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^agent\.environment_options: hard is none of"):
        try_environment(config(SEVERAL[1], "agent.environment=verifiers:adding-env,other"))
    try_environment(config(*SEVERAL))
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows.replace('"environment": "adding-env"', '"environment": "third"'))
    with pytest.raises(ConfigError, match=r"^data: extra_info\.environment is 'third'"):
        try_environment(config(*SEVERAL))


@pytest.mark.skipif(not PYTHON.is_file(), reason=MISSING)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("agent.environment=verifiers:nowhere", r"agent\.environment: .*nowhere"),
        (f"agent.environment_hosts={{python: {sys.executable}}}", r"agent\.environment_hosts\.python"),
        ("agent.environment_hosts={python: /no/python}", r"agent\.environment_hosts\.python"),
    ],
)
def test_one_that_cannot_work_is_refused_before_the_run(
    config: Callable[..., RunConfig], override: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{named}"):
        try_environment(config(override))


@pytest.mark.skipif(not PYTHON.is_file(), reason=MISSING)
@pytest.mark.timeout(600)
def test_a_row_without_its_task_is_refused_before_the_run(config: Callable[..., RunConfig], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text((tmp_path / "rows.jsonl").read_text().replace("answer", "no_such"))
    with pytest.raises(ConfigError, match=r"^data: extra_info\.task"):
        try_environment(config())
