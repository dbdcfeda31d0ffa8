"""What `rl-async sft` settles before ranks start: how data is split, which keys go together; and its table."""

import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rl_async.agent_loop.training_data import ChatEncoder, ChatTokens
from rl_async.configs.derived import parts
from rl_async.configs.load import load_config
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
from rl_async.trainer.finetune.chat_rows import ROWS, ChatRows
from tests.support.tiny_models import byte_tokenizer

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
