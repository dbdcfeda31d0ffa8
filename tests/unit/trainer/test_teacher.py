"""A teacher's scores, as a server's answers, and the comparison of tokenizers."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rl_async.configs.schema.algorithm import TeacherConfig
from rl_async.configs.schema.rollout import EndpointConfig
from rl_async.errors import ConfigError, UserError
from rl_async.messages import Media
from rl_async.reward_loop.api import ScorerFailed
from rl_async.trainer.algorithms.losses import divergence_of
from rl_async.trainer.algorithms.rows import Rows
from rl_async.trainer.batches import MicroBatch
from rl_async.trainer.images import Images
from rl_async.trainer.packing import Tensors, collate
from rl_async.trainer.teacher import Hints, TeacherEndpoint, Teachers, check_tokenizers, read_scores
from tests.conftest import VOCAB, make_rows, save_tokenizer
from tests.contracts.trainer.workers.objective import Table
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
    entries = read_scores(json.dumps(given).encode(), IDS, "url")
    assert [{token: value.logprob for token, value in entry.items()} for entry in entries] == [
        {6: -6.0, 9: -0.1},
        {7: -7.0},
    ]


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
    key = "algorithm.teacher.by_source.math.path"
    check_tokenizers({key: str(save_tokenizer(tmp_path / "same"))}, {}, str(policy))
    more = changed_tokenizer(tmp_path / "more", {"one more": len(vocabulary)})
    check_tokenizers({key: str(more)}, {}, str(policy))
    other = changed_tokenizer(tmp_path / "other", {one: vocabulary[two], two: vocabulary[one]})
    with pytest.raises(ConfigError, match=r"algorithm\.teacher\.by_source\.math\.path"):
        check_tokenizers({key: str(other)}, {}, str(policy))


async def test_a_server_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    policy = save_tokenizer(tmp_path)
    async with Outside(Answer({"prompt": "something else"})) as server:
        with pytest.raises(ConfigError, match=r"algorithm\.teacher\.endpoint"):
            served = {"algorithm.teacher.endpoint": endpoint(server.url)}
            await asyncio.to_thread(check_tokenizers, {}, served, str(policy))


def test_of_each_place_the_likeliest_tokens_are_kept() -> None:
    """The server also gives the sampled token where it is none of them."""
    entry = {"5": {"logprob": -3.0}, "8": {"logprob": -0.5}, "2": {"logprob": -1.5}}

    async def ask() -> list[tuple[Tensor, Tensor]]:
        async with Outside(Answer({"choices": [{"prompt_logprobs": [None, entry]}]})) as server:
            batches = [batch([4, 5], [4, 5], trains=[True, False])]
            found = await asyncio.to_thread(TeacherEndpoint(endpoint(server.url)).likeliest, batches, 2)
            assert [asked.body["prompt_logprobs"] for asked in server.asked] == [2]
            return found

    ((values, tokens),) = asyncio.run(ask())
    assert values[0].tolist() == [[-0.5, -1.5]] and tokens[0].tolist() == [[8, 2]]
    assert tokens[1].tolist() == [[0, 1]] and values[1].exp().sum() < 1


def test_a_server_that_names_too_few_tokens_is_an_error() -> None:
    async def ask() -> None:
        async with Outside(lambda body: Answer(answer(body["prompt"]))) as server:
            await asyncio.to_thread(TeacherEndpoint(endpoint(server.url)).likeliest, [batch([5, 6], trains=[True])], 2)

    with pytest.raises(UserError, match=r"algorithm\.teacher\.endpoint"):
        asyncio.run(ask())


TEMPLATE = "{% for m in messages %}w2 w3 {{ m['content'] }} w4 {% endfor %}"


def hinting(folder: Path, hint: str, template: str = TEMPLATE, bos: str | None = None) -> Hints:
    """Hints by the tests' tokenizer, which splits at spaces."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", bos_token=bos)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return Hints(hint, str(folder))


def test_a_hint_stands_in_front_of_the_row_as_a_system_message(tmp_path: Path) -> None:
    row = msgspec.structs.replace(
        make_rows(0)[0], ground_truth="w9 {feedback}", reward_reasons={"a": "w7", "b": "w8 w1"}
    )
    hinted = hinting(tmp_path, "w5 {ground_truth} {feedback}").before(row)
    # A placeholder within a value stays text, and so does the text of a special token.
    assert hinted.token_ids[:9].tolist() == [2, 3, 5, 9, 0, 7, 8, 4, *row.token_ids[:1].tolist()]
    assert hinted.token_ids[8:].tolist() == row.token_ids.tolist()
    assert hinted.loss_mask[8:].tolist() == row.loss_mask.tolist() and not hinted.loss_mask[:8].any()


def test_the_token_that_begins_a_text_stands_once(tmp_path: Path) -> None:
    row = make_rows(0)[0]
    row.token_ids[0] = 2
    hinted = hinting(tmp_path, "{ground_truth}", bos="w2").before(msgspec.structs.replace(row, ground_truth="w9"))
    assert hinted.token_ids.tolist() == [2, 3, 9, 4, *row.token_ids[1:].tolist()]


def test_a_template_that_prints_no_lone_system_message_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.teacher\.hint"):
        hinting(tmp_path, "{ground_truth}", "{{ raise_exception('the first message must be from the user') }}")


def test_a_teachers_scores_of_hinted_rows_stand_beside_the_rows_own_tokens(tmp_path: Path) -> None:
    """A model of bigrams has the same log-probabilities with and without a hint, if they stand where they belong."""
    rows = make_rows(0)[:3]
    for row, source in zip(rows, ("", "math", "code"), strict=True):
        row.ground_truth, row.data_source = "w9 " * (1 + len(source)), source
    tensors, table = collate(rows, device="cpu"), Table(0)
    teachers = Teachers({"math": table, "": table}, hinting(tmp_path, "{ground_truth}"))  # type: ignore[dict-item]
    micro = MicroBatch([0, 1, 2], tensors, Rows(torch.tensor([len(row.token_ids) - 1 for row in rows])))
    micro = replace(micro, readings=teachers.read(rows, tensors))
    assert micro.readings["math"].tensors.tokens[0, :7].tolist() == [2, 3, 9, 9, 9, 9, 9]
    scored, plain = teachers.logprobs(micro, {}), table.forward(tensors).logprobs
    assert plain is not None and torch.equal(scored[tensors.mask], plain[tensors.mask])
    whole = table.forward(tensors, frozenset({"distribution"})).distribution
    assert whole is not None
    distance = teachers.divergence(micro, {}, whole, divergence_of(TeacherConfig(divergence="reverse")))
    assert not distance[tensors.mask].any()


def test_a_row_whose_source_has_no_teacher_is_refused() -> None:
    rows = make_rows(0)[:1]
    rows[0].data_source = "code"
    with pytest.raises(UserError, match=r"algorithm\.teacher\.by_source.*'code'"):
        Teachers({"math": Table(0)}).read(rows, collate(rows, device="cpu"))  # type: ignore[dict-item]


def test_rows_with_images_get_no_hint(tmp_path: Path) -> None:
    rows = make_rows(0)[:1]
    rows[0].media = [Media(sha256="0" * 64, mime="image/png", position=1)]
    with pytest.raises(UserError, match=r"algorithm\.teacher\.hint"):
        Teachers({"": Table(0)}, hinting(tmp_path, "{feedback}")).read(  # type: ignore[dict-item]
            rows, collate(rows, device="cpu")
        )
