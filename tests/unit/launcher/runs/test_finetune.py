"""What `rl-async sft` settles before ranks start: how data is split, which keys go together; and its table."""

import base64
import io
import json
import random
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast, Qwen3ForCausalLM

from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.toy_tasks import make_pairs
from rl_async.agent_loop.training_data import ChatEncoder, ChatTokens, Pair, read_pairs, to_chat, to_pair
from rl_async.configs.derived import parts
from rl_async.configs.load import load_config
from rl_async.configs.schema.data import WarmStartConfig
from rl_async.errors import ConfigError, DataError, UserError
from rl_async.launcher.cli.__main__ import main
from rl_async.launcher.plan.planning import finetune_ranks
from rl_async.launcher.runs.finetune import (
    DATA_FILE,
    FinetuneView,
    _encode_once,
    encode_all,
    encode_pairs,
    line,
    longest,
    split,
)
from rl_async.launcher.runs.reward_model import RECORD_FILE, RewardModelJob, make_reward_model
from rl_async.launcher.runs.reward_model import split as reward_model_split
from rl_async.launcher.runs.tiny_model import WarmStartResult, save, tiny_model, warm_start, write_text_files
from rl_async.messages import Media
from rl_async.pictures import PictureProcessor
from rl_async.reward_loop.scorers.reward_model import ConversationEncoder, load_tokenizer
from rl_async.reward_loop.server.app import load_classifier, score
from rl_async.trainer.finetune import ROWS, ChatRows
from rl_async.trainer.packing import ImageRow, Images, embedded, lay_images
from tests.conftest import tiny_config
from tests.e2e.small_runs import call
from tests.support.tiny_models import byte_tokenizer, pickled

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BASE = ["model.path=base", "data.path=chats.jsonl", "finetune.out=out"]


def examples(count: int) -> list[tuple[ChatTokens]]:
    return [(ChatTokens(np.array([n], np.int32), np.array([True])),) for n in range(count)]


@pytest.mark.parametrize(
    ("count", "share", "held"), [(100, 0.05, 5), (10, 0.01, 1), (1, 0.5, 0), (10, 0.0, 0), (4, 1, 3)]
)
def test_some_conversations_are_held_out_and_some_are_left(count: int, share: float, held: int) -> None:
    train, held_out = split(examples(count), share, 0)
    assert len(held_out) == held
    assert sorted(int(row.ids[0]) for (row,) in [*train, *held_out]) == list(range(count))
    again = split(examples(count), share, 0)
    assert [row.ids[0] for (row,) in again[1]] == [row.ids[0] for (row,) in held_out]


def test_several_data_sets_are_all_read_each_with_its_own_templates(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "what is 2+3?"}, {"role": "assistant", "content": "5"}]
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    sets = f"data.path=[{{path: {tmp_path}/a.jsonl, system: brief}}, {{path: {tmp_path}/b.jsonl}}]"
    config = load_config(None, [*BASE, sets])
    assert config.finetune is not None
    tokenizer = byte_tokenizer(TEMPLATE, eos="<|im_end|>")
    found, skipped = encode_all(parts(config.data), ChatEncoder(tokenizer), 1000, config.finetune)
    rows = [row for (row,) in found]
    texts = [tokenizer.decode(row.ids) for row in rows]
    assert ["brief" in text for text in texts] == [True, False] and skipped == 0
    assert [tokenizer.decode(row.ids[row.learned]) for row in rows] == ["5<|im_end|>"] * 2


SUM = {"role": "user", "content": "2+3?"}
FIVE = {"role": "assistant", "content": "5"}
AGAIN = {"role": "user", "content": "sure?"}


@pytest.mark.parametrize(
    ("row", "better", "worse"),
    [
        ({"prompt": "2+3?", "chosen": "5", "rejected": "7"}, "5", "7"),
        ({"prompt": [SUM], "chosen": [FIVE], "rejected": [{"role": "assistant", "content": "55"}]}, "5", "55"),
        (
            # The first answer is the same, and so it is part of the prompt.
            {
                "chosen": [SUM, FIVE, AGAIN, {"role": "assistant", "content": "yes"}],
                "rejected": [SUM, FIVE, AGAIN, {"role": "assistant", "content": "no"}],
            },
            "yes",
            "no",
        ),
        (
            {
                "chosen": [SUM, FIVE],
                "rejected": [SUM, {"role": "assistant", "content": "6"}, AGAIN, {"role": "assistant", "content": "no"}],
            },
            "5",
            "6<|im_end|>no",
        ),
    ],
)
def test_of_a_pair_the_answers_that_differ_are_learned(
    tmp_path: Path, row: dict[str, object], better: str, worse: str
) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    config = load_config(None, [*BASE, f"data.path={tmp_path}/pairs.jsonl", "finetune.preferences={}"])
    assert config.finetune is not None
    tokenizer = byte_tokenizer(TEMPLATE, eos="<|im_end|>")
    ((pair,), skipped) = encode_pairs(parts(config.data), ChatEncoder(tokenizer), 1000, config.finetune)
    learned = [tokenizer.decode(each.ids[each.learned]) for each in pair]
    assert learned == [f"{better}<|im_end|>", f"{worse}<|im_end|>"] and skipped == 0


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("data.path=[{path: p.jsonl, system: brief}]", "data: system of p.jsonl"),
        ("data.path=[{path: p.jsonl, prompt: '{q}'}]", "data: prompt of p.jsonl"),
        ("finetune.preferences={loss: ipo, label_smoothing: 0.1}", "finetune.preferences.label_smoothing"),
    ],
)
def test_what_pairs_have_no_use_for_is_refused(given: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(None, [*BASE, "finetune.preferences={}", given])


def test_a_pair_of_which_one_continues_the_other_compares_nothing(tmp_path: Path) -> None:
    longer = [SUM, FIVE, AGAIN, {"role": "assistant", "content": "yes"}]
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"chosen": [SUM, FIVE], "rejected": longer}) + "\n")
    config = load_config(None, [*BASE, f"data.path={tmp_path}/pairs.jsonl", "finetune.preferences={}"])
    assert config.finetune is not None
    encoder = ChatEncoder(byte_tokenizer(TEMPLATE, eos="<|im_end|>"))
    with pytest.raises(DataError, match=r"pairs\.jsonl, row 0"):
        encode_pairs(parts(config.data), encoder, 1000, config.finetune)


def test_encoded_rows_are_those_of_the_files_and_the_template_that_are_there(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]
    data, model, run = (tmp_path / name for name in ("data", "model", "run"))
    data.mkdir()
    run.mkdir()
    for name in ("a", "b"):
        (data / f"{name}.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    tokenizer = byte_tokenizer(TEMPLATE, eos="<|im_end|>")
    tokenizer.save_pretrained(model)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    overrides = [f"model.path={model}", f"data.path={data}", "finetune.out=out", "finetune.held_out=0"]
    config = load_config(None, overrides)

    def first() -> tuple[int, str]:
        record = _encode_once(config, run)
        rows = ChatRows.map(run / ROWS)
        return record.conversations, tokenizer.decode(rows.ids[rows.span(0)])

    assert first() == (2, "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>")
    (data / "b.jsonl").unlink()
    assert first()[0] == 1
    tokenizer.chat_template = TEMPLATE.replace("\n{{ m.content", ": {{ m.content").replace("assistant\n", "assistant: ")
    tokenizer.save_pretrained(model)
    assert first()[1] == "<|im_start|>user: 2+3?<|im_end|>\n<|im_start|>assistant: 5<|im_end|>"
    # A run of a version that did not record the tokenizer's files goes on.
    record = json.loads((run / DATA_FILE).read_text())
    record["checksums"] = {path: value for path, value in record["checksums"].items() if path.startswith(str(data))}
    (run / DATA_FILE).write_text(json.dumps(record))
    written = (run / DATA_FILE).stat().st_mtime_ns
    assert first()[0] == 1 and (run / DATA_FILE).stat().st_mtime_ns == written


def test_the_longest_conversation_is_what_the_model_has_positions_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 64}}))
    overrides = [*BASE, f"model.path={tmp_path}"]
    assert longest(load_config(None, overrides)) == 64
    assert longest(load_config(None, [*overrides, "finetune.max_tokens=32"])) == 32
    with pytest.raises(UserError, match=r"finetune\.max_tokens=65: .* 64"):
        longest(load_config(None, [*overrides, "finetune.max_tokens=65"]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.learning_rate=1e-3", r"set finetune\.learning_rate"),
        ("trainer.steps=7", r"set finetune\.steps"),
        ("data.path=[{path: a.jsonl, weight: 2}]", "weight of a.jsonl"),
        ("data.eval_path=[{path: a.jsonl, ground_truth: '{a}'}]", "ground_truth of a.jsonl"),
        ("critic.shared=true", "critic"),
        ("trainer.tensor_parallel=2", "needs trainer.backend=megatron"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(override: str, message: str) -> None:
    load_config(None, BASE)
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*BASE, override])


def test_there_is_a_process_per_rank_and_all_meet_at_one_port(tmp_path: Path) -> None:
    specs = finetune_ranks(load_config(None, [*BASE, "trainer.ranks=2", "model.device=auto"]), tmp_path, 2)
    environments = [spec.environment({"rendezvous": 7}) for spec in specs]
    assert [env["RANK"] for env in environments] == ["0", "1"]
    assert {(env["MASTER_PORT"], env["WORLD_SIZE"], env["CUDA_VISIBLE_DEVICES"]) for env in environments} == {
        ("7", "2", "0,1")
    }


def test_a_line_weights_losses_by_tokens_and_tells_the_time_left() -> None:
    shared = {"epoch": 0.5, "learning_rate": 1e-5, "tokens/all": 300.0, "time/train_s": 0.5, "time/step_s": 31.0}
    records = [
        {"step": 3.0, "loss/train": 2.0, "tokens/trained": 10.0, **shared},
        {"step": 4.0, "loss/train": 1.0, "tokens/trained": 30.0, "eval/loss": 1.5, **shared},
    ]
    assert line(records, 7).split() == ["5", "0.50", "1.2500", "1.5000", "600", "1.0e-05", "1:02"]


def test_steps_that_are_trained_again_after_a_crash_are_shown_once(tmp_path: Path) -> None:
    def write(steps: range) -> None:
        fixed = {"epoch": 1, "loss/train": 1, "tokens/trained": 1, "tokens/all": 1, "learning_rate": 1}
        records = ({"step": step, **fixed, "time/train_s": 1, "time/step_s": 1} for step in steps)
        (tmp_path / "new").write_text("".join(json.dumps(record) + "\n" for record in records))
        (tmp_path / "new").replace(tmp_path / "metrics.jsonl")

    printed = StringIO()
    write(range(5))  # of an earlier start, which got as far as a checkpoint after 2 steps
    view = FinetuneView(tmp_path, 9, 2, Console(file=printed, width=120))
    view.show_new()
    assert printed.getvalue() == ""
    for steps in (range(2), range(6), range(4), range(9)):  # a crash after the sixth
        write(steps)
        view.show_new()
    assert [text.split()[0] for text in printed.getvalue().splitlines()] == ["steps", *"3456789"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "base"], "missing --data, --out; or give --config"),
        (["--model", "base", "--data", "c.jsonl", "--out", "out"], "model.path: base is not a folder"),
        (["--config", "mine.yaml"], "has no section `finetune`; add --out PATH"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("model: {path: base}\ndata: {path: c.jsonl}\n")
    assert main(["sft", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


# ``rl-async reward-model``: from pairs to a folder that the server takes.


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
    shape = tiny_config(
        vocab_size=len(tokenizer),
        num_hidden_layers=1,
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
    _, held_out = reward_model_split(read_pairs(str(data)), 0.25, 0)
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
    train, held_out = reward_model_split(pairs, 0.3, 0)
    assert len(train) == 28 and len(held_out) == 12
    assert not {p.prompt for p in train} & {p.prompt for p in held_out}
    assert reward_model_split(pairs, 0.3, 0) == (train, held_out) != reward_model_split(pairs, 0.3, 1)
    assert len(reward_model_split(pairs, 0.001, 0)[1]) == 4, "at least one prompt is held out"
    with pytest.raises(DataError, match="--held-out"):
        reward_model_split(pairs[:1], 0.5, 0)


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


# The tiny vision-language model of a warm start: it learns from images, and the trainer reads its folder.


COLOURS = ("red", "green", "blue")
DEMOS = [[{"role": "user", "content": "colour"}, {"role": "assistant", "content": c}] for c in COLOURS]
SETTINGS = WarmStartConfig(
    demos_path="none", vision=True, batch_size=12, min_steps=10, check_every=10, max_steps=200, gate=1.0
)


def coloured(colour: str, draw: random.Random) -> bytes:
    """A square of about this colour."""
    centre = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220)}[colour]
    file = io.BytesIO()
    Image.new("RGB", (32, 32), tuple(c + draw.randint(-30, 30) for c in centre)).save(file, "PNG")
    return file.getvalue()


def encoder(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast) -> PictureProcessor:
    """Build the image processor that the warm start writes beside the model."""
    write_text_files(folder, model, tokenizer)
    found = PictureProcessor.load(str(folder))
    assert found is not None
    return found


def question(number: int, draw: random.Random, tokenizer: PreTrainedTokenizerFast, processor: PictureProcessor) -> Any:
    """A row, and its image's bytes by SHA-256."""
    colour = draw.choice(COLOURS)
    data = coloured(colour, draw)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "colour"}]}]
    printed = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids, (place,) = processor.expand(tokenizer.encode(printed, add_special_tokens=False), [data])
    answer = tokenizer.encode(f"{colour}<|im_end|>", add_special_tokens=False)
    tokens = np.array(ids + answer)
    medium = Media.of(data, "image/png", place)
    return ImageRow(number, tokens, np.arange(len(tokens)) >= len(ids), [medium]), {medium.sha256: data}


def test_a_tiny_vision_model_learns_from_images_and_is_saved_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = train_tokenizer(DEMOS, 100, vision=True)
    model = tiny_model(SETTINGS, tokenizer)
    processor, draw = encoder(tmp_path / "text", model, tokenizer), random.Random(0)
    made = [question(number, draw, tokenizer, processor) for number in range(96)]
    rows, media = [row for row, _ in made], {sha: data for _, one in made for sha, data in one.items()}

    def shown(numbers: Any) -> Images:
        found = lay_images([rows[number] for number in numbers], media, processor, "cpu")
        assert found is not None
        return found

    def right(*, swapped: bool = False) -> float:
        """The share of held-out answers whose first token is the likeliest, perhaps after other images."""
        held = range(64, 96)
        tokens = torch.tensor(np.stack([rows[n].token_ids[: int(rows[n].loss_mask.argmax()) + 1] for n in held]))
        images = shown([n - 32 for n in held] if swapped else held)
        width = tokens.shape[1] - 1
        assert images.positions is not None
        cut = Images(images.inputs, images.features[:, :width], images.positions[:, :, :width])
        with torch.no_grad():
            likeliest = model(**embedded(model, tokens[:, :-1], cut), use_cache=False).logits[:, -1].argmax(-1)
        return (likeliest == tokens[:, -1]).double().mean().item()

    learned = [(row.token_ids.tolist(), row.loss_mask.tolist()) for row in rows[:64]]
    result = warm_start(model, learned, right, SETTINGS, lambda _: None, images_of=shown)
    assert result.gate_reward == 1.0
    # It answers by the image, not by the text.
    assert right(swapped=True) < 0.7

    save(tmp_path / "model", model, tokenizer, SETTINGS, WarmStartResult(1, 1.0, 0.0))
    loaded, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values()), info
    assert sum(p.numel() for p in loaded.parameters()) < 1_000_000
    again = PictureProcessor.load(str(tmp_path / "model"))
    assert again is not None
    one, two = (each.encode(coloured("red", random.Random(1))) for each in (processor, again))
    assert one.tokens == two.tokens and np.array_equal(one.inputs["pixel_values"], two.inputs["pixel_values"])


def asked(colour: str, draw: random.Random) -> dict[str, Any]:
    """A conversation in OpenAI's form about an image, and its answer."""
    url = f"data:image/png;base64,{base64.b64encode(coloured(colour, draw)).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    said = [{"role": "user", "content": [image, {"type": "text", "text": "colour"}]}]
    return {"messages": [*said, {"role": "assistant", "content": colour}]}


def test_conversations_with_images_are_encoded_as_episodes_see_them(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(DEMOS, 100, vision=True)
    processor = encoder(tmp_path, tiny_model(SETTINGS, tokenizer), tokenizer)
    chat = to_chat(asked("red", random.Random(0)), "chats.jsonl, line 1")
    tokens = ChatEncoder(tokenizer, pictures=processor).encode(chat)
    (image,) = tokens.images
    shown = processor.encode(image.data).tokens
    assert tokens.ids[image.position : image.position + len(shown)].tolist() == shown
    assert tokenizer.decode(tokens.ids[tokens.learned]) == "red<|im_end|>"
    before = tokenizer.decode(tokens.ids[: image.position])
    assert before == "<|im_start|>user\n<|vision_start|>"
    with pytest.raises(DataError, match=r"line 1.*reads text only"):
        ChatEncoder(tokenizer).encode(chat)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|image_pad|>", "")
    with pytest.raises(DataError, match=r"line 1.*0 marks of images and 1 images"):
        ChatEncoder(tokenizer, pictures=processor).encode(chat)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_fine_tuning_learns_what_images_show(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer, draw = train_tokenizer(DEMOS, 100, vision=True), random.Random(0)
    save(tmp_path / "base", tiny_model(SETTINGS, tokenizer), tokenizer, SETTINGS, WarmStartResult(1, 1.0, 0.0))
    rows = (json.dumps(asked(draw.choice(COLOURS), draw)) + "\n" for _ in range(120))
    (tmp_path / "chats.jsonl").write_text("".join(rows))
    settings = ["--epochs", "12", "--batch-size", "12", "--learning-rate", "3e-3", "model.dtype=float32"]
    done = call(tmp_path, "sft", "--model", "base", "--data", "chats.jsonl", "--out", "out", *settings)
    assert done.returncode == 0, done.stderr
    evaluations = [json.loads(line) for line in (tmp_path / "out.run/evaluations.jsonl").read_text().splitlines()]
    # Without the image each answer would be a guess among three, and its end is certain: log(3) / 2 for each token.
    assert evaluations[-1]["eval/loss"] < 0.1 < np.log(3) / 2
    assert PictureProcessor.load(str(tmp_path / "out")) is not None
