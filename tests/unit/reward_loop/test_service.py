"""Rewards: parts and weights, failures that mark one trajectory, limits."""

import asyncio
import functools
import math
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from rl_async import concurrency, extraction
from rl_async.agent_loop.chat_formats.format import reasoning_and_answer
from rl_async.configs.schema.reward import RewardConfig, RewardTerm
from rl_async.errors import ConfigError
from rl_async.messages import Turn
from rl_async.reward_loop.api import MOST_REASON, Score, ScorerFailed, to_score
from rl_async.reward_loop.model_client import RateLimit
from rl_async.reward_loop.scorer_process import MOST_BYTES
from rl_async.reward_loop.service import RewardService
from rl_async.transfer_queue.dataset import open_rows, to_task
from tests.unit.agent_loop.test_chat_formats import CHATS, THOUGHT
from tests.unit.reward_loop.outside import score, task, trajectory

USER = Path(__file__).with_name("user_scorers.py")


def config(*names: str, timeout_s: float = 10.0, **more: int) -> RewardConfig:
    return RewardConfig(functions=tuple(RewardTerm(name=name) for name in names), timeout_s=timeout_s, **more)


def user(name: str) -> str:
    return f"{USER}:{name}"


@pytest.mark.parametrize(("answer", "reward"), [("42", 1.0), (" 42\n", 1.0), ("43", 0.0), ("the answer is 42", 0.0)])
async def test_exact_answer_compares_what_was_said_last(answer: str, reward: float) -> None:
    async with RewardService(config("exact_answer")) as service:
        scored = await score(service, answer)
    assert (scored.reward, scored.reward_parts, scored.error) == (reward, {"exact_answer": reward}, "")
    assert scored.timings["generate"] == 1.0 and scored.timings["reward"] >= 0.0


@pytest.mark.parametrize("truth", ["", " \n"])
async def test_an_empty_ground_truth_is_no_answer_that_was_cut_off(truth: str) -> None:
    async with RewardService(config("exact_answer")) as service:
        scored = await score(service, "<think>hm", task(truth))
    assert not scored.scored and scored.reward == 0.0 and "unit, row ?" in scored.error


async def test_the_reward_is_the_weighted_sum_of_its_parts() -> None:
    terms = (
        RewardTerm(name="exact_answer", weight=2.0),
        RewardTerm(name=user("verl_style"), weight=0.5),
        RewardTerm(name=user("judge"), weight=-1.0),
        RewardTerm(name=user("count_turns"), weight=0.25),
    )
    async with RewardService(RewardConfig(functions=terms)) as service:
        scored = await score(service, "42")
    assert scored.error == ""
    assert scored.reward == 2.0 + 0.5 - 0.5 + 1.0
    assert scored.reward_parts == {
        "exact_answer": 1.0,
        user("verl_style"): 1.0,
        f"{user('verl_style')}/level": 3.0,
        user("judge"): 0.5,
        user("count_turns"): 4.0,
    }
    assert scored.reward_reasons == {user("verl_style"): "but these are"}


async def test_the_environments_reward_is_a_part_like_others() -> None:
    terms = (RewardTerm(name="environment", weight=2.0), RewardTerm(name="exact_answer"))
    async with RewardService(RewardConfig(functions=terms)) as service:
        row = trajectory("42")
        row.reward_parts = Score(0.5, {"guesses": 3.0}).named("environment")
        await service.score(task(), row)
        without = await score(service, "42")
    assert (row.reward, row.scored) == (2.0, True)
    assert row.reward_parts == {"environment": 0.5, "environment/guesses": 3.0, "exact_answer": 1.0}
    assert (without.scored, without.reward) == (False, 0.0) and "environment" in without.error


async def test_a_failing_scorer_marks_its_trajectory_and_names_itself() -> None:
    expected = {
        "raises": "raised KeyError: 'missing'",
        "dies": "ended its process (exit code 7)",
        "nonsense": "gave 'good', which is neither",
        "judge_out_of_reach": "raised TimeoutError: the judge's server is gone",
    }
    async with RewardService(config("exact_answer", *map(user, expected))) as service:
        scored = await score(service, "42")
    assert scored.reward == 0.0
    assert scored.reward_parts == {"exact_answer": 1.0}
    errors = scored.error.split("; ")
    for error, (name, reason) in zip(errors, expected.items(), strict=True):
        assert error.startswith(f"reward {user(name)}: {reason}")
    assert re.search(r"\(\S+\.py:\d+\)$", errors[0]), "the line that raised"


async def test_built_in_scorers_see_the_answer_and_functions_all_that_was_said() -> None:
    async with RewardService(config("exact_answer", user("sees_all"))) as service:
        whole, unfinished = await score(service, "<think>41?</think>42"), await score(service, "<think>42")
    assert (whole.reward, unfinished.reward, unfinished.scored) == (2.0, 0.0, True)


@pytest.mark.parametrize(
    ("chat", "prompt", "said", "reward"),
    [
        ("thinking", "x<think>\n", "maybe 42", 0.0),
        ("thinking", "x<think>\n", "41?</think>42", 1.0),
        ("thinking", "x<think>\n\n</think>\n\n", "42", 1.0),
        ("thinking", "x<think>\n", "41?</think> <think> maybe 42", 0.0),
        ("thinking", "x", "<think>42", 0.0),
        ("thinking", "x", "<think>41?</think>42", 1.0),
        ("thinking", "x", "42", 1.0),
        ("hermes", "x", "<think>42", 0.0),
        ("hermes", "x", "<think>41?</think>42", 1.0),
        ("hermes", "x", "<seed:think>42", 0.0),
        ("mistral", "x", "[THINK]42", 0.0),
        ("mistral", "x", "[THINK]41?[/THINK]42", 1.0),
        ("gpt-oss", "x", "<|channel|>analysis<|message|>42", 0.0),
        ("gpt-oss", "x", "<|channel|>analysis<|message|>42<|end|>", 0.0),
        ("gpt-oss", "x", f"{THOUGHT}<|channel|>final<|message|>42<|return|>", 1.0),
    ],
)
async def test_reasoning_is_what_the_chat_format_reads_as_such(
    chat: str, prompt: str, said: str, reward: float
) -> None:
    before, sampled = CHATS[chat].encode(prompt), CHATS[chat].encode(said)
    row = trajectory(CHATS[chat].turn_text(sampled))
    row.token_ids = np.array(before + sampled, np.int32)
    row.loss_mask = np.arange(len(row.token_ids)) >= len(before)
    row.turns[-1].start, row.turns[-1].end = len(before), len(row.token_ids)
    terms = (RewardTerm(name="exact_answer", extract=("last_number",)),)
    read = functools.partial(reasoning_and_answer, CHATS[chat])
    async with RewardService(RewardConfig(functions=terms), read=read) as service:
        await service.score(task(), row)
    assert (row.reward, row.scored, row.error) == (reward, True, "")


async def test_a_term_says_whether_it_sees_the_reasoning() -> None:
    for text, rewards in (("auto", (0.0, 1.0)), ("answer", (0.0, 0.0)), ("raw", (1.0, 1.0))):
        terms = tuple(
            RewardTerm(name=name, extract=("last_number",), text=text) for name in ("exact_answer", user("verl_style"))
        )
        async with RewardService(RewardConfig(functions=terms)) as service:
            parts = (await score(service, "<think>42")).reward_parts
        assert (parts["exact_answer"], parts[user("verl_style")]) == rewards


async def test_a_child_that_a_function_forks_answers_for_no_conversation() -> None:
    async with RewardService(config(user("forks"), processes=1)) as service:
        assert [(await score(service, str(number))).reward for number in range(6)] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cancelled", "CancelledError"),
        ("leaves", "SystemExit"),
        ("swallows", "reward.timeout_s"),
        ("raises_half_a_character", "ValueError"),
        ("gives_what_exits", "SystemExit"),
        ("raises_its_own", "_Own"),
        ("leaves_a_child_and_ends", "exit code 6"),
        *(
            # Each starts processes of its own.
            pytest.param(name, reason, marks=pytest.mark.slow)
            for name, reason in (
                ("leaves_too", "SystemExit"),
                ("raises_what_exits", "_ErrorThatExits"),
                ("raises_what_exits_too", "_ErrorThatExits"),
                ("is_interrupted", "KeyboardInterrupt"),
                ("raises_a_group", "BaseExceptionGroup"),
                ("swallows_all", "reward.timeout_s"),
                ("reads_its_input", "EOFError"),
                ("waits_for_a_child", "reward.timeout_s"),
                ("writes_lines", "ValueError"),
            )
        ),
    ],
)
async def test_nothing_that_a_function_raises_ends_the_service(name: str, reason: str) -> None:
    async with RewardService(config(user(name), user("judge"), timeout_s=3.0)) as service:
        for _ in range(2):
            scored = await score(service, "x")
            assert not scored.scored and f"reward {user(name)}: " in scored.error and reason in scored.error
            assert scored.reward_parts == {user("judge"): 0.5}
            scored.error.encode()


@pytest.mark.parametrize(
    "name",
    [
        *("ends_the_process", "stops_the_loop"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("cancels_all", "ends_the_loop_later")),
    ],
)
async def test_a_coroutine_that_ends_its_process_names_itself_and_the_next_has_another(name: str) -> None:
    async with RewardService(config(user(name), timeout_s=60.0)) as service:
        for _ in range(2):
            scored = await score(service, "x")
            assert not scored.scored and f"reward {user(name)}: " in scored.error
            assert "reward.timeout_s" not in scored.error


async def test_a_coroutine_that_blocks_fails_alone() -> None:
    async with RewardService(config(user("blocks_on_request"), timeout_s=4.0)) as service:
        assert (await score(service, "start")).reward == 1.0
        blocked = asyncio.create_task(score(service, "block"))
        # While the loop is blocked, so that these wait for the process to be replaced.
        await asyncio.sleep(2.5)
        others = await asyncio.gather(*(score(service, "x") for _ in range(3)))
        assert "reward.timeout_s" in (await blocked).error
    assert [(other.reward, other.error) for other in others] == [(1.0, "")] * 3


async def test_a_result_that_blocks_while_it_is_converted_misses_the_deadline() -> None:
    async with RewardService(config(user("gives_what_sleeps"), timeout_s=1.0)) as service:
        for _ in range(2):
            scored = await score(service, "x")
            assert not scored.scored and "reward.timeout_s" in scored.error


async def test_children_that_a_coroutine_forks_answer_for_no_conversation() -> None:
    async with RewardService(config(user("forks_beside_the_loop"))) as service:
        assert [(await score(service, str(number))).reward for number in range(4)] == [0.0, 1.0, 2.0, 3.0]


async def test_programs_that_a_function_starts_read_nothing() -> None:
    async with RewardService(config(user("lets_a_program_read_its_input"), user("says_its_reward"))) as service:
        scored = await score(service, "2")
    assert (scored.reward, scored.error) == (2.0, "")


async def test_an_error_is_one_line_of_bounded_length() -> None:
    async with RewardService(config(user("writes_lines"))) as service:
        error = (await score(service, "x")).error
    assert "\n" not in error and len(error) < 3000


@pytest.mark.parametrize("name", ["decorated", "hides_a_coroutine", "callable_object", "odd_keys"])
async def test_functions_of_any_make_are_called_and_awaited(name: str) -> None:
    async with RewardService(config(user(name))) as service:
        scored = await score(service, "x")
    assert (scored.scored, scored.reward, scored.error) == (True, 1.0, "")
    assert all(key.encode() for key in scored.reward_parts)


async def test_a_scorer_that_hangs_is_killed_and_its_place_is_served_again() -> None:
    async with RewardService(config(user("hangs_on_request"), timeout_s=1.0, limit=10**7)) as service:
        first = await score(service, "go on")
        stuck, after = await asyncio.gather(score(service, "hang"), score(service, "go on"))
        assert_ended(int(first.reward))
    assert_ended(int(after.reward))
    assert stuck.reward == 0.0
    assert stuck.error == f"reward {user('hangs_on_request')}: did not answer within 1 s (reward.timeout_s)"
    assert after.error == "" and after.reward != first.reward, "another process answers"


@pytest.mark.parametrize("name", ["takes_a_moment", pytest.param("stands_still_for_a_moment", marks=pytest.mark.slow)])
async def test_a_pause_of_the_machine_counts_little_of_a_scorers_time(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(concurrency, "LOOK_S", 0.1)
    async with RewardService(config(user(name), timeout_s=1.5)) as service:
        assert (await score(service, "starts the process")).scored
        scoring = asyncio.ensure_future(score(service, "pause"))
        await asyncio.sleep(0.1)
        time.sleep(1.9)  # noqa: ASYNC251  the process is to stand still
        assert (await scoring).error == ""


def assert_ended(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("value", ["1e39", "-1e39", "3"])
async def test_a_reward_beyond_the_limit_is_no_reward(value: str) -> None:
    async with RewardService(config("exact_answer", user("says_its_reward"), limit=2)) as service:
        scored, fine = await score(service, value), await score(service, "-2")
    assert not scored.scored and scored.reward == 0.0 and scored.reward_parts == {"exact_answer": 0.0}
    assert scored.error.startswith(f"reward {user('says_its_reward')}: ") and "reward.limit" in scored.error
    assert fine.scored and fine.reward == -2.0


async def test_the_weighted_sum_and_turns_have_the_limit_too() -> None:
    terms = (RewardTerm(name=user("says_its_reward"), weight=3.0),)
    async with RewardService(RewardConfig(functions=terms, limit=2.0)) as service:
        heavy, fine = await score(service, "1"), await score(service, "0.5")
        turns = [Turn(role="assistant", text="0", reward=math.inf)]
        turned = await score(service, "0", turns=turns)
    assert fine.scored and not heavy.scored and not turned.scored
    assert "reward.limit" in heavy.error and "turn 0" in turned.error


@pytest.mark.parametrize("reward", [math.nan, 2.5])
async def test_a_turns_reward_beyond_the_limit_in_any_row_leaves_all_rows_unscored(reward: float) -> None:
    first, middle, last = trajectory("0"), trajectory("0"), trajectory("42")
    first.turns[1].reward, middle.turns[3].reward = 1.0, reward
    async with RewardService(config("exact_answer", limit=2)) as service:
        await service.score(task(), last, first, middle)
        assert not any(row.scored for row in (first, middle, last))
        assert {row.reward for row in (first, middle, last)} == {0.0} and "turn 3" in first.error
        middle.turns[3].reward = None
        await service.score(task(), last, first, middle)
        assert {row.reward for row in (first, middle, last)} == {1.0}
        assert first.reward_parts == last.reward_parts and first.reward_parts is not last.reward_parts


async def test_a_scorer_that_needs_too_much_memory_fails_its_trajectory() -> None:
    async with RewardService(config(user("hoards"))) as service:
        hoarded, fine = await score(service, str(MOST_BYTES + (1 << 30))), await score(service, "8")
    assert hoarded.reward == 0.0 and not hoarded.scored and "memory" in hoarded.error
    assert (fine.reward, fine.error) == (8.0, "")


async def test_a_coroutine_that_hangs_is_given_up() -> None:
    async with RewardService(config(user("endless_judge"), timeout_s=0.05)) as service:
        scored = await score(service, "x", error="earlier")
    assert scored.error == f"earlier; reward {user('endless_judge')}: did not answer within 0.05 s (reward.timeout_s)"


async def test_a_conversation_given_up_ends_the_process_that_scores_it() -> None:
    async with RewardService(config(user("hangs_on_request"), timeout_s=3600.0, limit=10**7)) as service:
        first = await score(service, "go on")
        scoring = asyncio.create_task(score(service, "hang"))
        await asyncio.sleep(0.05)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        assert_ended(int(first.reward))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact", "no scorer 'exact'; built in: exact_answer, math"),
        ("nowhere.py:f", "no file nowhere.py"),
        ("judge", "judge needs the section reward.judge"),
        ("reward_model", "reward_model needs the section reward.model"),
        (user("missing"), "has no 'missing'"),
        (user("USER_DATA"), "has no 'USER_DATA'"),
        (user("asks_for_more"), "'weather'; a reward function may have data_source, solution_str"),
    ],
)
def test_scorers_that_do_not_exist_are_refused_at_once(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^reward\.functions: ") as caught:
        RewardService(config(name))
    assert message in str(caught.value)


async def test_math_compares_meaning() -> None:
    async with RewardService(config("math", timeout_s=60.0)) as service:
        for answer, reward in [("It is \\boxed{\\frac{1}{2}}", 1.0), ("0.5", 1.0), ("1/3", 0.0), ("", 0.0)]:
            scored = await score(service, answer, task("\\frac{1}{2}"))
            assert (scored.reward, scored.error) == (reward, ""), answer


async def test_reasoning_gym_scores_the_rows_of_its_source() -> None:
    pytest.importorskip("reasoning_gym", reason="install it with pip install 'rl-async[reasoning-gym]'")
    generated = to_task(open_rows("reasoning_gym:gcd", seed=3)[5], "row 5", "t")
    async with RewardService(config("reasoning_gym", timeout_s=60.0)) as service:
        right = await score(service, generated.ground_truth, generated)
        wrong = await score(service, "nothing", generated)
        stranger = await score(service, "42")
    assert (right.reward, right.error) == (1.0, "")
    assert wrong.reward < 0.5 and wrong.error == ""
    assert "needs a task of a reasoning_gym:NAME source" in stranger.error


def test_what_reward_functions_may_return() -> None:
    assert to_score(True) == Score(1.0)
    assert to_score(np.float32(0.5)) == Score(0.5)
    assert to_score(np.array([0.5])) == to_score({"score": np.array([[0.5]])}) == Score(0.5)
    assert to_score({"score": 1, "a": 2, "b": "x", "c": float("nan")}) == Score(1.0, {"a": 2.0})
    assert to_score({"score": 0, "reason": "too \ud800long"}) == Score(0.0, {}, "too ?long")
    assert to_score({"score": 1, "a": np.zeros(2), "b": 10**400}) == Score(1.0)
    assert to_score({"score": 0, "reason": 2}) == Score(0.0, {"reason": 2.0})
    assert len(to_score({"score": 0, "reason": "x" * 9999}).reason) == MOST_REASON
    for bad in (None, "1", {"a": 1}, float("inf"), [1], np.array(["1"]), np.array([math.nan]), np.zeros(2), 10**400):
        with pytest.raises(ScorerFailed, match="neither a finite number nor a mapping"):
            to_score(bad)


class FakeClock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def limit(self, count: int) -> RateLimit:
        return RateLimit(count, 60.0, lambda: self.now, self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_the_rate_limit_spaces_starts() -> None:
    clock = FakeClock()
    limit = clock.limit(2)
    starts = []
    for _ in range(5):
        await limit.wait()
        starts.append(clock.now - 100.0)
        clock.now += 10.0
    assert starts == [0.0, 10.0, 60.0, 70.0, 120.0]


async def test_no_rate_limit_never_waits() -> None:
    clock = FakeClock()
    for _ in range(100):
        await clock.limit(0).wait()
    assert clock.now == 100.0


async def test_no_more_scorings_at_once_than_allowed(tmp_path: Path) -> None:
    module = tmp_path / "counting.py"
    module.write_text(
        "import asyncio\n"
        "running = most = 0\n"
        "async def count(solution_str):\n"
        "    global running, most\n"
        "    running += 1\n"
        "    most = max(most, running)\n"
        "    await asyncio.sleep(0.005)\n"
        "    running -= 1\n"
        "    return most\n"
    )
    async with RewardService(config(f"{module}:count", max_concurrent=3)) as service:
        scored = await asyncio.gather(*(score(service, "x") for _ in range(12)))
    assert max(one.reward for one in scored) == 3.0


async def test_a_pattern_that_takes_too_long_fails_its_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "PATTERN_S", 0.05)
    endless = "regex:(a|aa)+$"
    async with RewardService(RewardConfig(functions=(RewardTerm(name="exact_answer", extract=(endless,)),))) as service:
        failed = await score(service, "a" * 400 + "!")
        found = await score(service, "the last is a")
    assert not failed.scored and endless in failed.error
    assert found.scored and found.reward_parts["exact_answer/extracted"] == 1.0


@pytest.mark.parametrize("scorer", ["exact_answer", "math"])
async def test_a_ground_truth_without_a_meaning_is_unscored_also_where_nothing_is_extracted(scorer: str) -> None:
    term = RewardTerm(name=scorer, extract=("boxed",))
    async with RewardService(RewardConfig(functions=(term,))) as service:
        for answer in ("\\boxed{5}", "nothing"):
            scored = await score(service, answer, task(" "))
            assert not scored.scored and "ground_truth" in scored.error


async def test_a_scorer_gets_what_was_extracted_and_nothing_found_is_worth_nothing() -> None:
    chain = ("answer_tag", "last_number")
    terms = (RewardTerm(name="exact_answer", extract=chain), RewardTerm(name=user("judge"), weight=0.5))
    async with RewardService(RewardConfig(functions=terms)) as service:
        found = await score(service, "40 + 2 is <answer>it is 42.0</answer>")
        lost = await score(service, "it is 42")
        failed = await score(service, "")
    assert (found.reward_parts["exact_answer"], found.reward_parts["exact_answer/extracted"]) == (1.0, 1.0)
    assert (lost.reward_parts["exact_answer"], lost.reward_parts["exact_answer/extracted"]) == (0.0, 0.0)
    assert (found.reward, lost.reward, failed.reward) == (1.25, 0.25, 0.0)
    assert set(lost.reward_reasons) == {"exact_answer"} and not found.reward_reasons
    assert found.scored and lost.scored and failed.scored
