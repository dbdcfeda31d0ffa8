"""A teacher's scores, as a server's answers, and the comparison of tokenizers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_async.configs.schema.algorithm import TeacherConfig
from rl_async.configs.schema.rollout import EndpointConfig
from rl_async.errors import ConfigError, UserError
from rl_async.reward_loop.api import ScorerFailed
from rl_async.trainer.images import Images
from rl_async.trainer.packing import Tensors
from rl_async.trainer.teacher import TeacherEndpoint, check_tokenizer, read_scores
from tests.conftest import save_tokenizer
from tests.unit.reward_loop.outside import Answer, Outside

IDS = [5, 6, 7]


def answer(ids: list[int], **more: Any) -> dict[str, Any]:
    """vLLM's answer to a prompt of tokens, each of which has the log-probability -id."""
    given = [None, *({str(token): {"logprob": -float(token), "rank": 1, "decoded_token": "x"}} for token in ids[1:])]
    return {"choices": [{"text": "x", "prompt_logprobs": given}], **more}


def endpoint(url: str, **settings: Any) -> EndpointConfig:
    return EndpointConfig(url=f"{url}/v1", model="large", backoff_s=0.01, **settings)


def batch(*rows: list[int], trains: list[bool]) -> Tensors:
    width = max(map(len, rows))
    tokens, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width - 1, dtype=torch.bool)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        mask[number, 0] = trains[number]
    return Tensors(tokens, torch.tensor([len(row) for row in rows]), mask, torch.ones(len(rows), 1, 1))


def test_rows_with_images_are_refused() -> None:
    tensors = batch(IDS, trains=[True])
    tensors.images = Images({}, torch.zeros_like(tensors.tokens), positions=None)
    with pytest.raises(UserError, match=r"algorithm\.teacher\.path"):
        TeacherEndpoint(endpoint("http://127.0.0.1:1/v1")).score([tensors])


def test_scores_are_those_of_the_tokens_after_the_first() -> None:
    given = answer(IDS)
    given["choices"][0]["prompt_logprobs"][1]["9"] = {"logprob": -0.1}
    assert read_scores(json.dumps(given).encode(), IDS, "url") == [-6.0, -7.0]


@pytest.mark.parametrize(
    "raw",
    [
        "{}",
        "[",
        '{"choices": []}',
        '{"choices": [{"text": "x"}]}',
        '{"choices": [{"text": "x", "prompt_logprobs": null}]}',
        '{"choices": [{"prompt_logprobs": [null, {"6": {"logprob": NaN}}, {"7": {"logprob": -1}}]}]}',
        '{"choices": [{"prompt_logprobs": [null, {"6": {"logprob": -1}}, {"8": {"logprob": -1}}]}]}',
        '{"choices": [{"prompt_logprobs": [null, {"6": {"logprob": -1}}]}]}',
        '{"choices": [{"prompt_logprobs": [null, {"6": {"logprob": -1}}, {"7": {"logprob": -1}}, null]}]}',
        '{"choices": [{"prompt_logprobs": [null, null, null]}]}',
        "[" * 100_000,
    ],
)
def test_an_answer_without_a_score_for_each_token_is_refused(raw: str) -> None:
    with pytest.raises(ScorerFailed, match="url"):
        read_scores(raw.encode(), IDS, "url")


async def test_only_rows_that_train_are_asked_for_and_a_lost_answer_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    busy = Answer({"error": "busy"}, status=503)
    async with Outside(busy, lambda body: Answer(answer(body["prompt"]))) as server:
        teacher = TeacherEndpoint(endpoint(server.url, api_key_env="TEACHER_KEY", extra_body={"priority": 3}))
        batches = [batch([5, 6, 7], [8, 9], trains=[True, False]), batch([4, 3], trains=[True])]
        scored = await asyncio.to_thread(teacher.score, batches)
    assert [each.tolist() for each in scored] == [[[-6.0, -7.0], [0.0, 0.0]], [[-3.0]]]
    assert sorted(asked.body["prompt"] for asked in server.asked[1:]) == [[4, 3], [5, 6, 7]]
    assert {asked.authorization for asked in server.asked} == {"Bearer secret"}
    assert {asked.body["priority"] for asked in server.asked} == {3}


@pytest.mark.parametrize("wrong", [Answer({"choices": []}), Answer({"error": "too long"}, status=400)])
async def test_a_server_that_does_not_score_is_an_error_that_names_the_key(wrong: Answer) -> None:
    async with Outside(wrong) as server:
        with pytest.raises(UserError, match=r"algorithm\.teacher\.endpoint"):
            await asyncio.to_thread(TeacherEndpoint(endpoint(server.url)).score, [batch([5, 6], trains=[True])])


async def test_a_silent_server_is_given_up_at_the_deadline() -> None:
    async with Outside(Answer(None)) as server:
        teacher = TeacherEndpoint(endpoint(server.url, timeout_s=0.2))
        with pytest.raises(UserError, match=r"algorithm\.teacher\.endpoint\.timeout_s"):
            await asyncio.to_thread(teacher.score, [batch([5, 6], trains=[True])])


def changed_tokenizer(folder: Path, change: dict[str, int]) -> Path:
    """A tokenizer as the tests' own, but for some tokens' numbers."""
    save_tokenizer(folder)
    file = folder / "tokenizer.json"
    read = json.loads(file.read_text())
    read["model"]["vocab"] |= change
    file.write_text(json.dumps(read))
    return folder


def test_a_teacher_must_number_the_policys_tokens_alike_and_may_have_more(tmp_path: Path) -> None:
    for name in ("policy", "same", "more", "other"):
        (tmp_path / name).mkdir()
    policy = save_tokenizer(tmp_path / "policy")
    vocabulary: dict[str, int] = json.loads((policy / "tokenizer.json").read_text())["model"]["vocab"]
    one, two = list(vocabulary)[-2:]
    check_tokenizer(TeacherConfig(path=str(save_tokenizer(tmp_path / "same"))), str(policy))
    more = changed_tokenizer(tmp_path / "more", {"one more": len(vocabulary)})
    check_tokenizer(TeacherConfig(path=str(more)), str(policy))
    other = changed_tokenizer(tmp_path / "other", {one: vocabulary[two], two: vocabulary[one]})
    with pytest.raises(ConfigError, match=r"algorithm\.teacher\.path"):
        check_tokenizer(TeacherConfig(path=str(other)), str(policy))


async def test_a_server_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    policy = save_tokenizer(tmp_path)
    async with Outside(Answer({"prompt": "something else"})) as server:
        with pytest.raises(ConfigError, match=r"algorithm\.teacher\.endpoint"):
            await asyncio.to_thread(check_tokenizer, TeacherConfig(endpoint=endpoint(server.url)), str(policy))
