"""``rl-async reward-model``: from pairs to a folder that the server takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.toy_tasks import make_pairs
from rl_async.agent_loop.training_data import Pair, read_pairs, to_pair
from rl_async.errors import DataError, UserError
from rl_async.launcher.runs.reward_model import RECORD_FILE, RewardModelJob, make_reward_model, split
from rl_async.reward_loop.scorers.reward_model import ConversationEncoder, load_tokenizer
from rl_async.reward_loop.server.classifier import load_classifier, score
from tests.support.tiny_models import pickled

LONGEST = 120


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_pairs("calculator-pairs", folder, pairs=64)
    return folder / "pairs.parquet"


@pytest.fixture(scope="module")
def causal(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random causal LM."""
    folder = tmp_path_factory.mktemp("causal")
    tokenizer = train_tokenizer([pair.chosen for pair in read_pairs(str(data))], 150)
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def request(data: Path, model: Path, out: Path, **more: Any) -> RewardModelJob:
    usual: dict[str, Any] = {
        "epochs": 3,
        "batch_size": 8,
        "learning_rate": 3e-3,
        "margin": 0.0,
        "held_out": 0.25,
        "seed": 0,
        "device": "cpu",
        "threads": 1,
    }
    return RewardModelJob(pairs=str(data), model=str(model), out=out, **(usual | more))


def test_a_causal_lm_becomes_a_reward_model_that_the_server_takes(data: Path, causal: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    reached = make_reward_model(request(data, causal, tmp_path / "rm"), lines.append)
    assert lines[0] == "48 pairs to train on, 16 held out"
    assert lines[-2].startswith("accuracy on 16 held-out pairs: ")
    model, tokenizer = (
        load_classifier(str(tmp_path / "rm"), "float32", "cpu"),
        load_tokenizer(str(tmp_path / "rm"), "t"),
    )
    assert model.config.pad_token_id == tokenizer.pad_token_id
    _, held_out = split(read_pairs(str(data)), 0.25, 0)
    right = 0
    encoder = ConversationEncoder(tokenizer)
    for pair in held_out:  # one conversation at a time, from the saved folder
        better, worse = (score(model, [encoder.ids(m)])[0] for m in (pair.chosen, pair.rejected))
        right += better > worse
    assert right / 16 == reached == json.loads((tmp_path / "rm" / RECORD_FILE).read_text())["accuracy"]
    assert list(tmp_path.iterdir()) == [tmp_path / "rm"], "nothing else is left behind"
    again = make_reward_model(request(data, tmp_path / "rm", tmp_path / "more", epochs=1), lines.append)
    assert f"{reached:.4f} before, {again:.4f} after" in lines[-2], "training goes on from a reward model"


def pair(prompt: str, answer: str) -> Pair:
    return to_pair({"prompt": prompt, "chosen": answer, "rejected": "no"}, "test")


def test_a_prompt_is_on_one_side_only() -> None:
    pairs = [pair(f"prompt {i % 10}", f"answer {i}") for i in range(40)]
    train, held_out = split(pairs, 0.3, 0)
    assert len(train) == 28 and len(held_out) == 12
    assert not {p.prompt for p in train} & {p.prompt for p in held_out}
    assert split(pairs, 0.3, 0) == (train, held_out) != split(pairs, 0.3, 1)
    assert len(split(pairs, 0.001, 0)[1]) == 4, "at least one prompt is held out"
    with pytest.raises(DataError, match="--held-out"):
        split(pairs[:1], 0.5, 0)


def test_a_conversation_too_long_is_named(causal: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{i}?", "chosen": "1", "rejected": "2" if i < 3 else "2" * LONGEST} for i in range(4)]
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=rf"pairs.jsonl, row 3, column rejected: .*{LONGEST}"):
        make_reward_model(request(file, causal, tmp_path / "rm"), str)
    assert not (tmp_path / "rm").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"held_out": 0.0}, "--held-out: needs a share between 0 and 1"),
        ({"batch_size": 0}, "--batch-size: must be above 0"),
        ({"learning_rate": -1.0}, "--learning-rate: must be above 0"),
        ({"model": "nowhere"}, "--model: there is no folder nowhere"),
    ],
)
def test_mistakes_in_the_arguments(more: dict[str, Any], said: str, data: Path, causal: Path, tmp_path: Path) -> None:
    wanted = request(data, causal, tmp_path / "rm")
    with pytest.raises(UserError, match=said):
        make_reward_model(RewardModelJob(**{**vars(wanted), **more}), str)


def test_an_existing_folder_is_not_written_over(data: Path, causal: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--out: .* exists"):
        make_reward_model(request(data, causal, tmp_path), str)


def test_weights_that_are_pickles_are_not_read(data: Path, causal: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--model"):
        make_reward_model(request(data, pickled(causal, tmp_path / "causal"), tmp_path / "rm"), str)
    make_reward_model(request(data, causal, tmp_path / "rm"), str)
    with pytest.raises(UserError, match="reward model: cannot load"):
        load_classifier(str(pickled(tmp_path / "rm", tmp_path / "copy")), "float32", "cpu")
