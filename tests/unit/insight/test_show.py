"""``rl-async show`` finds the step's rows and marks what did not train fully."""

import gzip
import zipfile
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models

from rl_async.configs.load import dump, load_config
from rl_async.errors import UserError
from rl_async.insight.show import ERRORS, RecordedRow, RecordedTurn, read_step, render, reward_parts, show, turn_rewards
from rl_async.launcher.cli.__main__ import main
from rl_async.messages import Explanation, Media, RuleRun
from rl_async.recording import images_file
from tests.support.vision_models import drawing


def words(ids: Sequence[int]) -> str:
    return "".join("abcdefghij"[i] for i in ids)


def row(
    sample: int = 0,
    weights: Sequence[float] = (1.0, 0.5, 0.25, 0.0, 0.0, 0.0, 1.0),
    segment: int = 0,
    reward: float = 1.0,
    role: str = "",
) -> RecordedRow:
    """Three tokens of context, seven sampled."""
    rules = [RuleRun("band", 3, 4), RuleRun("seq_mean_k1", 4, 6)] if 0.0 in weights else []
    return RecordedRow(
        group_id=4,
        sample=sample,
        segment=segment,
        reward=reward,
        role=role,
        token_ids=list(range(10)),
        loss_mask=[False] * 3 + [True] * 7,
        correction=Explanation(weights=list(weights), rules=rules),
    )


def write(folder: Path, name: str, *rows: RecordedRow) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    with gzip.open(folder / name, "wb") as file:
        file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def test_tokens_are_marked_with_the_rule_or_the_weight() -> None:
    text = render(row(), words)
    assert text.plain == "abcd{ef}(x0.25){g}(band){hi}(seq_mean_k1)j"
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styles == {"abc": "dim", "{ef}(x0.25)": "yellow", "{g}(band)": "magenta", "{hi}(seq_mean_k1)": "red"}


def test_turn_rewards_are_shown_with_their_reasons() -> None:
    turns = [RecordedTurn(role="user"), RecordedTurn(role="assistant", reward=-0.5, reason="wrong\x1b[2J guess")]
    shown = turn_rewards(msgspec.structs.replace(row(), turns=turns))
    assert shown == ["turn 1: reward -0.5 (wrong\\x1b[2J guess)"]


def test_parts_of_the_reward_are_shown_with_their_reasons(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts, reasons = {"judge": 0.5, "judge/raw": 5.0}, {"judge": "polite \x1b[2J"}
    judged = msgspec.structs.replace(row(), reward_parts=parts, reward_reasons=reasons)
    write(run / "trajectories", "step-000009-lineage0-rank0.jsonl.gz", judged)
    assert main(["show", str(run), "--step", "9"]) == 0
    assert "judge: reward 0.5 (polite \\x1b[2J)" in capsys.readouterr().out


def test_the_most_frequent_errors_of_a_step_are_shown_with_their_counts(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = ["bad answer \x1b[2J", *["reward mine.py:f: ValueError: 7"] * 2, "", "c", "d"]
    rows = [msgspec.structs.replace(row(n), error=error, scored=not error) for n, error in enumerate(errors)]
    write(run / "trajectories", "step-000009-lineage0-rank0.jsonl.gz", *rows)
    assert main(["show", str(run), "--step", "9"]) == 0
    out = capsys.readouterr().out
    shown = [line for line in out.splitlines() if "6 rows" in line]
    assert ", not scored" in out
    assert "2 of" in shown[0] and "mine.py:f: ValueError: 7" in shown[0] and "\\x1b[2J" in shown[1]
    assert len(shown) == ERRORS


def test_the_reason_for_the_whole_reward_of_an_agent_program_is_shown() -> None:
    graded = msgspec.structs.replace(row(), reward=0.25, reward_parts={}, reward_reasons={"reward": "a quarter"})
    assert reward_parts(graded) == ["reward: reward 0.25 (a quarter)"]


def test_escape_sequences_of_a_model_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    plain = msgspec.structs.replace(row(), correction=None)
    shown = render(plain, lambda ids: "a\x1b]0;owned\x07\x9b2J\r\u202e\n\tb").plain
    assert shown == "a\\x1b]0;owned\\x07\\x9b2J\\r\\u202e\n\tb" * 2


def test_a_row_without_explanation_is_shown_plainly() -> None:
    assert render(msgspec.structs.replace(row(), correction=None), words).plain == "abcdefghij"


def test_a_step_is_read_from_all_ranks_of_its_newest_lineage(tmp_path: Path) -> None:
    write(tmp_path, "step-000002-lineage0-rank0.jsonl.gz", row(9))
    write(tmp_path, "step-000002-lineage10-rank0.jsonl.gz", row(1))
    write(tmp_path, "step-000002-lineage10-rank1.jsonl.gz", row(0))
    write(tmp_path, "step-000003-lineage9-rank0.jsonl.gz", row(7))  # abandoned by a resume
    write(tmp_path, "step-000001-lineage0-rank0.jsonl.gz", row(5))
    step, rows = read_step(tmp_path, None)
    assert step == 2 and [r.sample for r in rows] == [0, 1]
    assert [r.sample for r in read_step(tmp_path, 1)[1]] == [5]
    with pytest.raises(UserError, match="steps 1 to 3, counted from 0"):
        read_step(tmp_path, 7)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    vocabulary = {letter: number for number, letter in enumerate("abcdefghij")}
    Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.yaml").write_text(dump(load_config("calculator", [f"model.path={tmp_path}"])))
    write(
        tmp_path / "trajectories", "step-000003-lineage0-rank0.jsonl.gz", row(0, [1.0] * 7), row(1), row(2, [1.0] * 7)
    )
    return tmp_path


def test_images_are_shown_by_their_sizes_and_once_where_they_stand(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    media = [Media.of(drawing(1), "image/png", 1), Media.of(b"lost", "image/gif", 6)]
    shown = msgspec.structs.replace(row(), token_ids=[0, 1, 1, 1, 2, 3, 4, 4, 5, 6], media=media)
    write(run / "trajectories", "step-000009-lineage0-rank0.jsonl.gz", shown)
    file = images_file(run / "trajectories" / "step-000009-lineage0-rank0.jsonl.gz")
    with zipfile.ZipFile(file, "w") as images:
        images.writestr(media[0].sha256, drawing(1))
    assert main(["show", str(run), "--step", "9"]) == 0
    found = capsys.readouterr().out
    assert f"image at token 1: image/png, 40 x 24 pixels, {len(drawing(1)):,} bytes" in found
    assert "image at token 6: image/gif, not recorded" in found
    assert render(shown, words).plain == "ab{cd}(x0.25){e}(band){f}(seq_mean_k1)g"


def test_the_most_corrected_row_is_shown_below_the_table(run: Path) -> None:
    out = StringIO()
    show(run, None, None, None, Console(file=out, width=120))
    assert "step 3" in out.getvalue() and "band 1, seq_mean_k1 2" in out.getvalue()
    assert "group 4, sample 1, reward 1" in out.getvalue() and "{h i}(seq_mean_k1)" in out.getvalue()


def test_a_row_can_be_named_on_the_command_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run), "--step", "3", "--group", "4", "--sample", "2"]) == 0
    assert "group 4, sample 2" in capsys.readouterr().out
    assert main(["show", str(run), "--group", "4"]) == 0
    assert "step 3, group 4" in (told := capsys.readouterr().out) and "group 4, sample 1" in told
    assert main(["show", str(run), "--group", "5"]) == 2
    assert "--group 5" in capsys.readouterr().err


def test_what_is_not_there_is_named_as_it_was_asked_for(run: Path) -> None:
    with pytest.raises(UserError, match=r"--group 99$"):
        show(run, None, 99, None)
    with pytest.raises(UserError, match=str(run / "elsewhere")):
        show(run / "elsewhere", None, None, None)
    (recorded,) = (run / "trajectories").iterdir()
    whole = recorded.read_bytes()
    for damaged in (whole[:-4], b"nothing", whole[:60] + b"?" + whole[61:], gzip.compress(b'{"role": "\xff"}')):
        recorded.write_bytes(damaged)
        with pytest.raises(UserError, match=recorded.name):
            show(run, None, None, None)
    recorded.write_bytes(whole)
    (run / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        show(run, None, None, None)


def test_rows_of_one_sample_are_told_apart(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean, marked = row(0, [1.0] * 7), row(0, segment=1)
    write(run / "trajectories", "step-000004-lineage0-rank0.jsonl.gz", marked, clean)
    assert [r.segment for r in read_step(run / "trajectories", 4)[1]] == [0, 1]
    assert main(["show", str(run), "--step", "4", "--group", "4", "--sample", "0"]) == 0
    assert "group 4, sample 0, segment 1, reward 1" in capsys.readouterr().out


def test_a_groups_reward_is_the_mean_over_its_episodes(run: Path) -> None:
    rows = [row(0, segment=number, reward=1.0) for number in range(3)] + [row(1, reward=0.0)]
    write(run / "trajectories", "step-000004-lineage0-rank0.jsonl.gz", *rows)
    out = StringIO()
    show(run, 4, None, None, Console(file=out, width=120))
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    assert [cell.strip() for cell in line.split("│")[1:5]] == ["4", "2", "4", "0.5"]


def test_what_was_not_scored_is_in_no_mean(run: Path) -> None:
    rows = [row(0, reward=1.0), row(1, reward=0.0), row(2, reward=0.0, segment=1)]
    rows[1].scored = False
    write(run / "trajectories", "step-000004-lineage0-rank0.jsonl.gz", *rows)
    rows[0].scored = rows[2].scored = False
    write(run / "trajectories", "step-000005-lineage0-rank0.jsonl.gz", *rows)
    for step, reward in ((4, "0.5"), (5, "not scored")):
        out = StringIO()
        show(run, step, None, None, Console(file=out, width=120))
        (line,) = [line for line in out.getvalue().splitlines() if line.startswith("│")]
        assert [cell.strip() for cell in line.split("│")[1:5]] == ["4", "3", "3", reward]


def test_roles_are_told_apart_and_an_episodes_reward_is_the_mean_of_theirs(run: Path) -> None:
    played = (("buyer", 1.0, 0), ("seller", 0.0, 1), ("seller", 0.0, 2))
    rows = [row(0, [1.0] * 7, segment=number, reward=reward, role=role) for role, reward, number in played]
    write(run / "trajectories", "step-000004-lineage0-rank0.jsonl.gz", *rows)
    out = StringIO()
    show(run, 4, None, None, Console(file=out, width=120))
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    assert [cell.strip() for cell in line.split("│")[1:5]] == ["4", "1", "3", "0.5"]
    assert "group 4, sample 0, role buyer, reward 1" in out.getvalue()
