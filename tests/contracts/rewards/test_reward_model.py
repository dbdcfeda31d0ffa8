"""The reward model's process and the scorer that asks it, over real HTTP, with a tiny random model."""

import asyncio
import json
import math
import random
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForSequenceClassification

from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.toy_tasks import KINDS
from rl_async.configs.schema.reward import RewardModelConfig
from rl_async.errors import ConfigError
from rl_async.messages import Turn
from rl_async.process.http_auth import TOKEN_FILE, bearer, make_tokens, run_token, token_file
from rl_async.reward_loop.api import Conversation, ScorerFailed
from rl_async.reward_loop.scorers.reward_model import RewardModel
from rl_async.reward_loop.server import app
from tests.conftest import tiny_config
from tests.support.forked import Forked
from tests.support.ports import free_port
from tests.support.rounding import pass_rounding

START_S = 90.0
LONGEST = 96
# A score is a sum of 32 normalised states, of magnitude 1, with weights of magnitude 0.3.
TOLERANCE = pass_rounding(32 * 0.3, layers=2, terms=LONGEST)


def make_classifier(folder: Path, tokenizer: PreTrainedTokenizerFast, labels: int) -> None:
    torch.manual_seed(1)
    shape = tiny_config(
        vocab_size=len(tokenizer),
        max_position_embeddings=LONGEST,
        pad_token_id=tokenizer.eos_token_id,  # as many tokenizers have it: the token that ends a turn
        initializer_range=0.3,
    )
    shape.num_labels = labels
    Qwen3ForSequenceClassification(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    draw, generator = random.Random(0), KINDS["sort"]
    samples = [generator.sample(draw) for _ in range(50)]
    demos = [[{"role": "user", "content": s.prompt}, *generator.demonstrate(s, draw)] for s in samples]
    return train_tokenizer(demos, 120)


@pytest.fixture(scope="module")
def folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward-model")
    make_classifier(path, tokenizer, 1)
    return path


def start(path: Path, port: int, run: Path | None = None) -> Forked:
    """The server of the model in ``path``, with the token of ``run``, by default in the same folder."""
    run = run or path
    make_tokens(run / "keys")
    arguments = ("--model", str(path), "--port", str(port), "--batch-size", "4")
    variables = {TOKEN_FILE: str(token_file(run, "engines"))}
    return Forked("rl_async.reward_loop.server", *arguments, environment=variables)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """Where the server answers; it must end well on SIGTERM."""
    port = free_port()
    process = start(folder, port)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5.0) as answer:
                    assert answer.status == 200
                    break
            except urllib.error.URLError:
                time.sleep(0.05)
        yield url
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode in (0, -signal.SIGTERM)
    finally:
        process.kill()


@pytest.fixture(scope="module")
def token(url: str, folder: Path) -> str:
    return run_token(folder, "engines")


def test_without_the_token_nothing_is_scored(url: str) -> None:
    assert classify(url, "", input="sort 1")[0] == 401
    assert classify(url, "0" * 43, input="sort 1")[0] == 401


def test_without_a_token_file_it_does_not_start(folder: Path) -> None:
    process = Forked("rl_async.reward_loop.server", "--model", str(folder), "--port", str(free_port()))
    _, errors = process.communicate(START_S)
    assert process.returncode == 2 and TOKEN_FILE in errors


def classify(url: str, token: str, **body: Any) -> tuple[int, dict[str, Any]]:
    headers = {"Content-Type": "application/json", **bearer(token)}
    request = urllib.request.Request(f"{url}/classify", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def reference(folder: Path, row: list[int]) -> float:
    """The head on the hidden state of the last token, one sequence at a time, without padding or a mask."""
    model = Qwen3ForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model.model(torch.tensor([row])).last_hidden_state[0, -1]
        return float(model.score(hidden))


def conversation(*texts: str) -> Conversation:
    turns = [Turn(role=("user", "assistant")[i % 2], text=text) for i, text in enumerate(texts)]
    return Conversation(data_source="unit", solution_str=texts[-1], ground_truth="", turns=turns)


def client(url: str, folder: Path, token: str = "") -> RewardModel:
    return RewardModel(RewardModelConfig(path=str(folder)), url, token)


async def test_the_scorer_gives_what_the_model_gives(
    url: str, token: str, folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    talks = [("sort 321", "123"), ("sort 1", "1", "sort 98765", "56789"), ("?", ""), ("sort 321", "321")] * 5
    rewards = client(url, folder, token)
    scores = await asyncio.gather(*(rewards.score(conversation(*talk)) for talk in talks))
    await rewards.close()
    for talk, score in zip(talks, scores):
        text = ""
        for i, said in enumerate(talk):
            text += f"<|im_start|>{('user', 'assistant')[i % 2]}\n{said}<|im_end|>\n"
        expected = reference(folder, tokenizer(text, add_special_tokens=False)["input_ids"])
        assert score.value == pytest.approx(expected, abs=TOLERANCE)
    assert len({round(score.value, 4) for score in scores}) == 4, "the model tells the conversations apart"


def test_rows_that_end_with_the_padding_token_are_read_at_their_end(folder: Path) -> None:
    model = app.load_classifier(str(folder), "float32", "cpu")
    padding = model.config.pad_token_id
    rows = [[5, 6, padding], [5, 6], [7, padding, padding, padding], [0], [padding]]
    assert app.score(model, rows) == pytest.approx([reference(folder, row) for row in rows], abs=TOLERANCE)


def test_every_form_of_input(url: str, token: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["sort 12", "1", "sort 987654321"]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    expected = [reference(folder, row) for row in rows]
    for given in (texts, rows):
        status, answer = classify(url, token, model="any", input=given, use_activation=False)
        assert status == 200 and answer["object"] == "list"
        assert [item["index"] for item in answer["data"]] == [0, 1, 2]
        assert [item["num_classes"] for item in answer["data"]] == [1, 1, 1]
        assert [item["probs"] for item in answer["data"]] == [[pytest.approx(e, abs=TOLERANCE)] for e in expected]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, rows))
    for one in (texts[0], rows[0]):
        (item,) = classify(url, token, input=one)[1]["data"]
        assert item["probs"] == [pytest.approx(1.0 / (1.0 + math.exp(-expected[0])), abs=TOLERANCE)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "input: it is empty"),
        ("", "has no tokens"),
        ([[1, 2], []], "has no tokens"),
        ([1] * (LONGEST + 1), f"{LONGEST + 1} tokens; the model takes at most {LONGEST}"),
        ([1, 100000], "token ids must be from 0 to"),
        ([-1], "token ids must be from 0 to"),
        ([1, "a"], "mixed"),
        ("sort 1" * 1_000_000, f"the model takes {LONGEST} tokens"),
        ({"text": "a"}, "input"),
        (None, "input"),
    ],
)
def test_what_cannot_be_scored_is_refused(url: str, token: str, given: Any, said: str) -> None:
    status, answer = classify(url, token, input=given)
    assert status == 400
    assert said in answer["error"]["message"]


def test_a_body_nested_too_deeply_is_refused(url: str, token: str) -> None:
    request = urllib.request.Request(f"{url}/classify", b'{"input": ' + b"[" * 100_000, bearer(token))
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code == 400
    refused.value.close()


async def test_a_conversation_too_long_is_a_failure_that_says_so(url: str, token: str, folder: Path) -> None:
    rewards = client(url, folder, token)
    with pytest.raises(ScorerFailed, match=rf"answered 400: .* the model takes at most {LONGEST}"):
        await rewards.score(conversation("sort 1", "1" * LONGEST))
    await rewards.close()


async def test_a_configured_engine_is_asked_instead_of_the_runs_own(
    url: str, token: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_KEY", token)
    wanted = RewardModelConfig(path=str(folder), url=f"{url}/", name="org/rm", api_key_env="RM_KEY")
    rewards = RewardModel(wanted, "http://127.0.0.1:1")
    assert math.isfinite((await rewards.score(conversation("sort 1", "1"))).value)
    await rewards.close()


def test_without_a_server_or_a_tokenizer_the_scorer_is_refused(
    folder: Path, tmp_path: Path, model_folder: Path
) -> None:
    with pytest.raises(ConfigError, match=r"reward\.model\.url: no server runs the reward model"):
        client("", folder)
    with pytest.raises(ConfigError, match=r"reward\.model\.path: there is no folder"):
        client("http://x", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"reward\.model\.path: .* has no chat template"):
        client("http://x", model_folder)


def test_models_that_give_no_reward_do_not_start(
    model_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    two = tmp_path / "two"
    make_classifier(two, tokenizer, 2)
    expected = {model_folder: "not a sequence classifier", two: "has 2 labels", tmp_path / "none": "there is no folder"}
    processes = [(start(path, free_port(), tmp_path), said) for path, said in expected.items()]
    for process, said in processes:
        _, errors = process.communicate(timeout=START_S)
        assert process.returncode == 2 and "Traceback" not in errors
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert said in line
