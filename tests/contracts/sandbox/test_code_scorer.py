"""The scorer `code` on real programs, and as `rl-async reward test` shows it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl_async.configs.schema.reward import CodeConfig, RewardConfig, RewardTerm
from rl_async.configs.schema.sandbox import SandboxConfig
from rl_async.launcher.cli.__main__ import main
from rl_async.messages import Trajectory
from rl_async.reward_loop.api import Conversation, ScorerFailed
from rl_async.reward_loop.scorers.code import CodeScorer
from rl_async.reward_loop.service import RewardService
from rl_async.sandbox.api import SandboxLost
from tests.contracts.sandbox.conftest import settings_of
from tests.unit.reward_loop.rows import score as score_by
from tests.unit.reward_loop.rows import task

PAIRS = {"inputs": ["1 2\n", "3 4\n", "-1 1\n"], "outputs": ["3\n", "7\n", "0\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
ASSERTS = "assert add(1, 2) == 3\nassert add(3, 4) == 7\n"
ADD = "def add(a, b):\n    return a + b\n"


async def score(settings: SandboxConfig, program: str, truth: Any, **code: Any) -> Trajectory:
    text = truth if isinstance(truth, str) else json.dumps(truth)
    config = RewardConfig(functions=(RewardTerm(name="code"),), code=CodeConfig(**{"test_timeout_s": 60.0, **code}))
    async with RewardService(config, sandbox=settings) as service:
        return await score_by(service, f"I think:\n```python\n{program}\n```", task(text))


@pytest.mark.parametrize(
    ("program", "truth", "reward"),
    [
        ("print(sum(map(int, input().split())))", PAIRS, 1.0),
        ("print(abs(sum(map(int, input().split()))) or 5)", PAIRS, 2 / 3),
        ("print(3); raise SystemExit(1)", PAIRS, 0.0),
        ("not python", PAIRS, 0.0),
        (ADD, CALLS, 1.0),
        (f"class Solution:\n    {'    '.join(ADD.replace('(a', '(self, a').splitlines(True))}", CALLS, 1.0),
        ("def add(a, b):\n    print('debug', end='')\n    return 3", CALLS, 0.5),
        ("def add(a, b):\n    return {1}", CALLS, 0.0),
        ("def sub(a, b): pass", CALLS, 0.0),
        (f"{ADD}\nif __name__ == '__main__':\n    input('never')", CALLS, 1.0),
        (ADD, ASSERTS, 1.0),
        ("def add(a, b):\n    return 7", ASSERTS, 0.5),
        (
            ADD,
            "from solution import add\ndef test_one():\n    assert add(1, 1) == 2\ndef test_two():\n    assert 0",
            0.5,
        ),
        ("raise SystemExit(0)", ASSERTS, 0.0),
        ("import os\nos._exit(0)", ASSERTS, 0.0),
        ("class Any:\n    __eq__ = lambda *_: True\ndef add(a, b):\n    return Any()", CALLS, 0.0),
    ],
)
async def test_rewards(settings: SandboxConfig, program: str, truth: Any, reward: float) -> None:
    scored = await score(settings, program, truth)
    assert (scored.scored, scored.error) == (True, "")
    assert scored.reward == pytest.approx(reward)


async def test_the_parts_tell_what_ran(settings: SandboxConfig) -> None:
    scored = await score(settings, "print(3)", PAIRS)
    parts = scored.reward_parts
    assert scored.reward_reasons == {"code": "failed: test 1, 2"}
    assert (parts["code"], parts["code/passed"], parts["code/tests"]) == (pytest.approx(1 / 3), 1.0, 3.0)
    times = [parts[f"code/test_{number}_s"] for number in range(3)]
    assert parts["code/seconds"] == pytest.approx(sum(times)) and parts["code/longest_s"] == max(times)


async def test_all_or_nothing_stops_at_the_first_failure(settings: SandboxConfig) -> None:
    scored = await score(settings, "print(7)", PAIRS, all_or_nothing=True)
    assert scored.reward == 0.0 and "code/test_1_s" not in scored.reward_parts
    assert scored.reward_reasons == {"code": "failed: test 0; not reached: test 1 to 2"}
    assert (await score(settings, ADD, CALLS, all_or_nothing=True)).reward == 1.0


async def test_what_takes_too_long_has_failed(settings: SandboxConfig) -> None:
    scored = await score(settings, "while True: pass", PAIRS, test_timeout_s=0.5, timeout_s=0.8)
    assert (scored.scored, scored.reward) == (True, 0.0)
    assert "code/test_2_s" not in scored.reward_parts


async def test_no_program_is_no_reward_and_bad_tests_are_no_score(settings: SandboxConfig) -> None:
    config = RewardConfig(functions=(RewardTerm(name="code"),))
    async with RewardService(config, sandbox=settings) as service:
        scored = await score_by(service, "print(3)", task(json.dumps(PAIRS)))
        assert (scored.reward, scored.reward_parts["code/extracted"]) == (0.0, 0.0)
        scored = await score_by(service, "```python\nprint(3)\n```", task("{}"))
        assert not scored.scored and "DataError" in scored.error


async def test_a_lost_sandbox_is_no_score() -> None:
    class Lost:
        async def open(self) -> Any:
            raise SandboxLost("gone")

    scorer = CodeScorer(CodeConfig(), Lost())
    conversation = msgspec.convert(
        {"data_source": "", "solution_str": "```python\n1\n```", "ground_truth": ASSERTS}, type=Conversation
    )
    with pytest.raises(ScorerFailed):
        await scorer.score(conversation)


def test_reward_test_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings_of("bubblewrap")
    rows, answers = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    truth = {"ground_truth": json.dumps(PAIRS), "style": "rule"}
    prompt = [{"role": "user", "content": "Add two numbers."}]
    rows.write_text(json.dumps({"data_source": "sums", "prompt": prompt, "reward_model": truth}) + "\n")
    answers.write_text(json.dumps({"answer": "```python\nprint(3)\n```"}) + "\n")
    assert main(["reward", "test", str(rows), "--answers", str(answers), "reward.functions=[{name: code}]"]) == 0
    shown = capsys.readouterr().out
    assert "code 0.333" in shown and "passed 1\n" in shown and "tests 3\n" in shown and "test_0_s" in shown
