import asyncio
import io
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from rl_async.agent_loop.chat_formats.format import TooLong
from rl_async.agent_loop.episode import policy_sampling
from rl_async.configs.checks import check
from rl_async.configs.load import load_config
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_SIGNAL, EXIT_USER, ConfigError, EngineLost, QueueLost, RowsLost
from rl_async.insight.recorded_evaluations import read_lines, write_lines
from rl_async.launcher.cli.__main__ import main
from rl_async.launcher.run_folder import create
from rl_async.launcher.runs import evaluate as module
from rl_async.launcher.runs.evaluate import (
    ATTEMPTS_TO_REACH,
    EVAL_ID,
    Endpoint,
    EvaluationRun,
    EvaluationTimeout,
    HeldOutSamples,
    MessageLines,
    evaluate_endpoint,
    play,
    print_report,
    without_training,
)
from rl_async.messages import Done, Leased, NotReady, Reserved, RowKey, Task, Trajectory, TrajectoryHeader, Turn
from rl_async.process.http_auth import make_tokens
from rl_async.recording import evaluation_file, read_images, read_trajectories, write_trajectories
from rl_async.rollout_server.api import GenerateRequest
from tests.conftest import make_rows
from tests.support.ports import free_port
from tests.unit.reward_loop.outside import Answer, Outside, says


def header(group_id: int, reward: float, role: str = "", segment: int = 0) -> TrajectoryHeader:
    return TrajectoryHeader(
        group_id=group_id,
        sample=0,
        attempt=0,
        partition="eval",
        episode_id="e",
        segment=segment,
        role=role,
        tokens=1,
        sampled=1,
        reward=reward,
        finish_reason="stop",
        versions=[],
        tokens_hash="",
    )


def task(source: str, name: str = "t") -> Task:
    return Task(task_id=name, data_source=source, prompt=[], ground_truth="")


def printed(result: Reserved) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    print_report(result, 1.0, console)
    return console.export_text()


def test_each_data_source_has_a_line_and_all_together_one() -> None:
    result = Reserved(
        step=0,
        headers=[header(1, 1.0), header(2, 0.0), header(3, 0.5)],
        tasks={1: task("math", "a"), 2: task("math", "b"), 3: task("code", "a")},
    )
    lines = [line.split() for line in printed(result).splitlines() if "[" in line]
    assert [(words[0], words[1], words[3]) for words in lines] == [
        ("code", "1", "0.500"),
        ("math", "2", "0.500"),
        ("all", "3", "0.500"),
    ]


def test_one_data_source_needs_no_total() -> None:
    text = printed(Reserved(step=0, headers=[header(1, 1.0)], tasks={1: task("math")}))
    assert "math" in text and "all" not in text and "scored" not in text


def test_roles_have_a_line_each() -> None:
    headers = [
        header(1, 1.0, "buyer"),
        header(1, 0.0, "seller", 1),
        header(2, 0.0, "buyer"),
        header(2, 0.0, "seller", 1),
    ]
    text = printed(Reserved(step=0, headers=headers, tasks={1: task("market", "a"), 2: task("market", "b")}))
    lines = [line for line in text.splitlines() if "[" in line]
    assert ["0.500" in lines[0], "0.000" in lines[1], "0.250" in lines[2]] == [True] * 3
    assert "market as buyer" in lines[0] and "market as seller" in lines[1] and "all" in lines[2]


def test_an_episode_is_written_with_its_last_answer_and_each_role_by_itself(tmp_path: Path) -> None:
    base = msgspec.structs.replace(make_rows(0)[0], group_id=1, sample=0, reward=1.0, data_source="s", scored=True)
    rows = [
        msgspec.structs.replace(base, segment=segment, role=role, scored=scored, finish_reason=reason, turns=turns)
        for segment, role, scored, reason, turns in [
            (1, "a", True, "length", [Turn(role="assistant", text="last", reward=0.5)]),
            (0, "a", True, "stop", [Turn(role="assistant", text="first")]),
            (2, "b", False, "stop", [Turn(role="assistant", text="other")]),
        ]
    ]
    write_lines(tmp_path / "out.jsonl", rows)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [
        (line["role"], line["answer"], line["finish_reason"], line["reward"], line["scored"]) for line in lines
    ] == [
        ("a", "last", "length", 1.5, True),
        ("b", "other", "stop", 0.0, False),
    ]


def test_episodes_without_a_score_are_told() -> None:
    headers = [header(1, 1.0), msgspec.structs.replace(header(2, 1.0), scored=False)]
    text = printed(Reserved(step=0, headers=headers, tasks={1: task("math", "a"), 2: task("math", "b")}))
    assert "0.500" in text and "1 of 2 episodes could not be scored" in text


def test_without_any_trajectory_there_is_still_a_table() -> None:
    assert "avg@k" in printed(Reserved(step=0, headers=[]))


def test_one_small_group_is_left_to_train_on() -> None:
    adapters = ["trainer.lora={}", "weight_sync.adapters=add"]
    config = without_training(load_config("calculator-async", ["trainer.ranks=2", *adapters, "rollout.replay=runs/a"]))
    check(config)
    assert config.rollout.replay == "", "its answers are sampled"
    alive = (config.queue.max_staleness + 1) * config.data.train_batch_groups
    assert (alive, config.trainer.steps, config.rollout.group_size) == (1, 1, 2)
    assert config.model == load_config("calculator-async").model


class Queue:
    """Ten groups of one sample. One is finished with each answer, until ``stuck`` are; then it ``hangs`` or repeats."""

    def __init__(self, stuck: int = 10, hangs: bool = False, lost: bool = False) -> None:
        self.stuck, self.hangs, self.lost = stuck, hangs, lost
        self.finished = 0
        self.hung = asyncio.Event()
        self.rows = [msgspec.structs.replace(make_rows(0)[0], group_id=group, sample=0) for group in range(10)]

    async def evaluate(self, eval_id: int) -> Done:
        return Done()

    async def eval_result(self, eval_id: int, wait_s: float, *, so_far: bool = False) -> Reserved | NotReady:
        await asyncio.sleep(0.01)
        if self.lost and so_far:
            raise QueueLost("no answer")
        if so_far or self.finished == 10:
            headers = [row.header() for row in self.rows[: self.finished]]
            return Reserved(step=0, headers=headers, tasks={group: task("s", str(group)) for group in range(10)})
        if self.finished == self.stuck and self.hangs:
            self.hung.set()
            await asyncio.Event().wait()
        self.finished = min(self.finished + 1, self.stuck)
        return NotReady(why="some are missing", finished=self.finished, groups=10)

    async def fetch(self, keys: Sequence[RowKey]) -> list[Trajectory]:
        return [row for row in self.rows if row.header().key in keys]

    async def fetch_media(self, rows: Sequence[Trajectory]) -> dict[str, bytes]:
        return {"ab": b"image"}


class Held:
    """An evaluation by ``queue``, and what is printed and kept of it. ``whole`` files have another name than others."""

    def __init__(self, queue: Any, folder: Path, jsonl: str = "out.jsonl") -> None:
        make_tokens(folder / "keys")
        config = load_config("calculator", ["eval.samples=1", "trainer.batch_timeout_s=0.001"])
        self._console = Console(width=300, record=True, file=io.StringIO())
        self.run = EvaluationRun(queue, config, folder, self._console)
        self.lines, self.folder = folder / jsonl, folder

    @property
    def outcome(self) -> Any:
        return self.run.outcome

    def tell(self) -> list[str]:
        self.outcome.tell(1.0, self.lines)
        return self._console.export_text().splitlines()

    def kept(self) -> tuple[int, int, int]:
        """How many episodes are in the file of lines, in the run folder's whole file, and in its partial one."""
        whole, part = (evaluation_file(self.folder, EVAL_ID, whole=whole) for whole in (True, False))
        files = {self.lines: read_lines, whole: read_trajectories, part: read_trajectories}
        lines, of_all, of_some = (len(read(file)) if file.exists() else 0 for file, read in files.items())
        return lines, of_all, of_some


def has_table(said: list[str]) -> bool:
    return any("avg@k" in line for line in said)


async def test_an_evaluation_may_take_longer_than_its_deadline_as_long_as_tasks_are_finished(tmp_path: Path) -> None:
    held = Held(Queue(), tmp_path)
    await held.run.run()
    said = held.tell()
    assert held.kept() == (10, 10, 0) and has_table(said) and "10 of 10" not in said[-1]
    assert read_images(evaluation_file(tmp_path, EVAL_ID), ["ab"]) == {"ab": b"image"}
    assert held.outcome.whole and held.outcome.exit_code == 0


class Losing(Queue):
    """Rows are lost when six tasks are finished and again when all are; their tasks are played again."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = 0

    async def eval_result(self, eval_id: int, wait_s: float, *, so_far: bool = False) -> Reserved | NotReady:
        reply = await super().eval_result(eval_id, wait_s, so_far=so_far)
        if self.finished == 6 and not self.losses:
            self.losses, self.finished = 1, 0
        return reply

    async def fetch(self, keys: Sequence[RowKey]) -> list[Trajectory]:
        if self.losses == 1:
            self.losses, self.finished = 2, 4
            raise RowsLost("a shard has ended")
        return await super().fetch(keys)


async def test_tasks_that_are_played_again_are_progress(tmp_path: Path) -> None:
    queue = Losing()
    held = Held(queue, tmp_path)
    await held.run.run()
    held.tell()
    assert queue.losses == 2 and held.outcome.whole and held.kept() == (10, 10, 0)


async def test_what_was_finished_is_kept_when_no_further_task_is(tmp_path: Path) -> None:
    held = Held(Queue(stuck=3), tmp_path)
    with pytest.raises(EvaluationTimeout, match=r"trainer\.batch_timeout_s"):
        await held.run.run()
    said = held.tell()
    assert held.kept() == (3, 0, 3) and has_table(said)
    assert all(words in said[-1] for words in ("3 of 10", str(held.lines), "-partial"))


async def test_what_was_finished_is_kept_when_a_signal_ends_it(tmp_path: Path) -> None:
    queue = Queue(stuck=4, hangs=True)
    held = Held(queue, tmp_path)
    running = asyncio.create_task(held.run.run())
    await queue.hung.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    said = held.tell()
    assert held.kept() == (4, 0, 4) and "4 of 10" in said[-1]


async def test_a_signal_while_the_episodes_are_written_leaves_them_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, written = asyncio.get_running_loop(), []

    def write(path: Path, rows: Sequence[Trajectory], media: Mapping[str, bytes]) -> None:
        loop.call_soon_threadsafe(running.cancel)
        time.sleep(0.05)  # so that a loop that is not kept waiting comes to it
        write_trajectories(path, rows, media=media)
        written.append(path)

    monkeypatch.setattr(module, "write_trajectories", write)
    held = Held(Queue(), tmp_path)
    running = asyncio.create_task(held.run.run())
    await asyncio.wait([running])
    held.tell()
    assert written == [evaluation_file(tmp_path, EVAL_ID)] and held.kept() == (10, 10, 0)


@pytest.mark.parametrize("stuck", [10, 3])
async def test_a_file_that_cannot_be_written_hides_neither_the_results_nor_why_it_ended(
    tmp_path: Path, stuck: int
) -> None:
    (tmp_path / "trajectories").touch()
    held = Held(Queue(stuck=stuck), tmp_path)
    with pytest.raises(EvaluationTimeout) if stuck < 10 else nullcontext():
        await held.run.run()
    said = held.tell()
    assert has_table(said) and len(read_lines(held.lines)) == stuck
    assert held.outcome.kept == [held.lines] and held.outcome.exit_code == 1
    assert any(str(tmp_path / "trajectories") in line for line in said)


async def test_lines_that_cannot_be_written_come_after_the_results(tmp_path: Path) -> None:
    held = Held(Queue(), tmp_path, "missing/out.jsonl")
    await held.run.run()
    said = held.tell()
    assert has_table(said) and str(held.lines) in said[-1]
    assert held.kept() == (0, 10, 0) and held.outcome.exit_code == 1


@pytest.mark.parametrize(("queue", "unread"), [({"stuck": 0}, False), ({"stuck": 2, "lost": True}, True)])
async def test_nothing_is_written_where_nothing_is_complete_or_the_queue_is_gone(
    tmp_path: Path, queue: dict[str, Any], unread: bool
) -> None:
    held = Held(Queue(**queue), tmp_path)
    with pytest.raises(EvaluationTimeout):
        await held.run.run()
    assert len(held.tell()) == 1, "either that nothing was complete, or that it is not known"
    assert held.kept() == (0, 0, 0) and bool(held.outcome.unread) == unread


async def test_an_evaluation_of_which_all_was_complete_when_a_signal_came_is_whole(tmp_path: Path) -> None:
    queue = Queue()
    fetching, real = asyncio.Event(), queue.fetch

    async def fetch(keys: Sequence[RowKey]) -> list[Trajectory]:
        if not fetching.is_set():
            fetching.set()
            await asyncio.Event().wait()
        return await real(keys)

    queue.fetch = fetch  # type: ignore[method-assign]
    held = Held(queue, tmp_path)
    running = asyncio.create_task(held.run.run())
    await fetching.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    held.tell()
    assert held.kept() == (10, 10, 0)


TASK = Task(task_id="t:0", data_source="sums", prompt=[{"role": "user", "content": "what is 2+3?"}], ground_truth="5")
READY = says("OK")  # to the first request, which no episode sends


def calls(*arguments: str, **more: Any) -> Answer:
    found = [
        {"id": f"c{number}", "type": "function", "function": {"name": "calculator", "arguments": text}}
        for number, text in enumerate(arguments)
    ]
    return says(None, "tool_calls", tool_calls=found, **more)  # type: ignore[arg-type]


def config(it: Outside, *overrides: str) -> RunConfig:
    endpoint = {"url": f"{it.url}/v1", "model": "m", "backoff_s": 0.01, "attempts": 2}
    return load_config("calculator", [f"eval.endpoint={json.dumps(endpoint)}", *overrides])


async def played(it: Outside, folder: Path, *overrides: str, tasks: int = 1) -> list[Trajectory]:
    given = config(it, *overrides)
    assert given.eval.endpoint is not None
    samples = HeldOutSamples([TASK] * tasks, given)
    await play(given, given.eval.endpoint, samples, folder / "run")
    return samples.rows


async def started(it: Outside, folder: Path) -> asyncio.subprocess.Process:
    """Start the command on two tasks, one after the other."""
    endpoint = ["--endpoint", f"{it.url}/v1", "--model", "m", "--jsonl", "out.jsonl"]
    overrides = ["eval.tasks=2", "agent.concurrency=1", "queue.max_attempts=1"]
    command = ["-m", "rl_async.launcher.cli", "eval", "--config", "calculator", *endpoint, *overrides]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    return await asyncio.create_subprocess_exec(sys.executable, *command, cwd=folder, env=environment)


async def test_calls_are_structured_and_their_results_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBJECT_KEY", "sesame")
    said = calls('{"expression": "2+3"}', reasoning_content="add them")
    async with Outside(READY, said, says("5")) as it:
        (row,) = await played(it, tmp_path, "eval.endpoint.api_key_env=SUBJECT_KEY")
    assert (row.reward, row.scored, row.finish_reason, row.partition) == (1.0, True, "stop", "eval")
    assert [(turn.role, len(turn.tool_calls)) for turn in row.turns] == [
        *(("user", 0), ("assistant", 1), ("tool", 0), ("assistant", 0)),
    ]
    assert "add them" in row.turns[1].text and row.turns[1].tool_calls[0].result == "5"
    assert len(row.token_ids) == len(row.logprobs) == 0 and row.header().tokens == 0
    assert {asked.authorization for asked in it.asked} == {"Bearer sesame"}
    first, second = it.asked[1].body, it.asked[2].body
    assert [tool["function"]["name"] for tool in first["tools"]] == ["calculator"]
    assert (first["temperature"], first["max_tokens"]) == (0.0, 48)
    sent = {"name": "calculator", "arguments": '{"expression": "2+3"}'}
    assert second["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c0", "type": "function", "function": sent}]},
        {"role": "tool", "content": "5", "tool_call_id": "c0"},
    ]


async def test_arguments_that_are_no_json_are_a_bad_call_and_are_sent_back_as_json(tmp_path: Path) -> None:
    async with Outside(READY, calls('{"expression": 2+', "[1]", ""), says("5")) as it:
        (row,) = await played(it, tmp_path)
    assert [(call.error, call.problem) for call in row.turns[1].tool_calls[:2]] == [
        ("bad call", "bad_json"),
        ("bad call", "bad_arguments"),
    ]
    sent = [call["function"]["arguments"] for call in it.asked[-1].body["messages"][1]["tool_calls"]]
    assert [type(json.loads(text)) for text in sent if text] == [dict, dict]


async def test_an_answer_that_was_cut_ends_the_episode(tmp_path: Path) -> None:
    async with Outside(READY, says("5 and", "length")) as it:
        (row,) = await played(it, tmp_path)
    assert (row.finish_reason, row.turns[-1].text, len(it.asked)) == ("length", "5 and", 2)


async def test_a_busy_endpoint_is_asked_again(tmp_path: Path) -> None:
    async with Outside(READY, Answer({"error": "slow down"}, 429, {"Retry-After": "1"}), says("5")) as it:
        (row,) = await played(it, tmp_path)
    assert (row.reward, row.timings["generate"] >= 1.0, len(it.asked)) == (1.0, True, 3)


@pytest.mark.parametrize("broken", [Answer({}, 500), Answer("<html>"), Answer({"choices": []}), Answer({}, 0)])
async def test_an_episode_that_fails_is_in_the_results_with_its_error(tmp_path: Path, broken: Answer) -> None:
    async with Outside(READY, broken) as it:
        rows = await played(it, tmp_path, "eval.samples=2", "queue.max_attempts=2", tasks=2)
    assert [(row.group_id, row.sample) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(not row.scored and row.error and row.finish_reason == "error" for row in rows)
    tries = 2 if broken.status in (500, 0) else 1
    assert len(it.asked) == 1 + 4 * 2 * tries


@pytest.mark.parametrize("refused", [Answer({"error": "key"}, 401), Answer({"error": "model"}, 404), Answer({}, 500)])
async def test_what_no_request_can_pass_is_told_before_any_episode(tmp_path: Path, refused: Answer) -> None:
    async with Outside(refused) as it:
        with pytest.raises(ConfigError, match=r"eval\.endpoint"):
            await played(it, tmp_path)
    assert len(it.asked) <= 2 and not (tmp_path / "run").exists()


async def test_a_server_that_takes_no_tools_is_told_before_any_episode(tmp_path: Path) -> None:
    def without_tools(body: dict[str, Any]) -> Answer:
        return Answer({"error": "tools need --enable-auto-tool-choice"}, 400) if body.get("tools") else says("5")

    async with Outside(without_tools) as it:
        with pytest.raises(ConfigError):
            await played(it, tmp_path)
    assert len(it.asked) == 1 and not (tmp_path / "run").exists()


async def test_an_evaluation_without_any_score_fails_and_keeps_its_errors(tmp_path: Path) -> None:
    async with Outside(READY, Answer({"error": "no"}, 400)) as it:
        command = await started(it, tmp_path)
        async with asyncio.timeout(60):
            assert await command.wait() == 1
    lines = read_lines(tmp_path / "out.jsonl")
    assert len(lines) == 2 and all(line.error and not line.scored for line in lines)


async def test_a_url_where_nobody_listens_is_told_at_once_and_tried_a_few_times(tmp_path: Path) -> None:
    endpoint = {"url": f"http://127.0.0.1:{free_port()}/v1", "model": "m", "backoff_s": 0.001, "attempts": 50}
    given = load_config("calculator", [f"eval.endpoint={json.dumps(endpoint)}"])
    assert given.eval.endpoint is not None
    told: list[str] = []
    with pytest.raises(ConfigError, match=rf"attempt {ATTEMPTS_TO_REACH} of {ATTEMPTS_TO_REACH}"):
        await play(given, given.eval.endpoint, HeldOutSamples([TASK], given), tmp_path / "run", told.append)
    assert len(told) == 1 and endpoint["url"] in told[0] and "\n" not in told[0]


async def test_an_endpoint_that_answered_once_is_tried_as_often_as_configured(tmp_path: Path) -> None:
    endpoint = {"model": "m", "backoff_s": 0.001, "attempts": ATTEMPTS_TO_REACH + 2}
    async with Outside(READY) as it:
        given = load_config("calculator", [f"eval.endpoint={json.dumps({'url': f'{it.url}/v1', **endpoint})}"])
        assert given.eval.endpoint is not None
        subject = Endpoint(given.eval.endpoint)
        request = GenerateRequest(
            request_id="r",
            token_ids=MessageLines().prompt(TASK.prompt),
            sampling=policy_sampling(given, "eval"),
            max_tokens=9,
            stop_token_ids=[],
        )
        await subject.generate(request, session="s")
    with pytest.raises(EngineLost, match=f"of {ATTEMPTS_TO_REACH + 2}"):
        await subject.generate(request, session="s")
    await subject.close()


async def test_a_silent_endpoint_has_a_deadline(tmp_path: Path) -> None:
    async with Outside(Answer(None)) as it:
        with pytest.raises(ConfigError, match=r"eval\.endpoint\.timeout_s"):
            await played(it, tmp_path, "eval.endpoint.timeout_s=0.1")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
async def test_what_was_played_before_an_interruption_is_kept(tmp_path: Path, number: signal.Signals) -> None:
    async with Outside(READY, says("5"), Answer(None)) as it:
        command = await started(it, tmp_path)
        try:
            async with asyncio.timeout(60):
                while len(it.asked) < 3:
                    assert command.returncode is None
                    await asyncio.sleep(0.05)
                command.send_signal(number)
                assert await command.wait() == EXIT_SIGNAL + number
        finally:
            if command.returncode is None:
                command.kill()
                await command.wait()
    (line,) = read_lines(tmp_path / "out.jsonl")
    assert (line.answer, line.scored) == ("5", True)
    (run,) = (tmp_path / "runs").iterdir()
    (row,) = read_trajectories(evaluation_file(run, EVAL_ID, whole=False))
    assert row.turns[-1].text == "5"


@pytest.mark.parametrize("done", [1, 2])
def test_what_was_played_before_an_error_is_kept_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], done: int
) -> None:
    async def broken(config: RunConfig, _endpoint: Any, samples: HeldOutSamples, folder: Path, _tell: Any) -> None:
        create(config, folder)
        for group in range(done):
            await samples.fail(group, 0, 0, "no answer")
        raise QueueLost("broken")

    monkeypatch.setattr(module, "play", broken)
    monkeypatch.setattr(module, "prepare_data", lambda *_: None)
    monkeypatch.setattr(module, "held_out_tasks", lambda _: [TASK, TASK])
    place = [f"launcher.run_dir={tmp_path}", "queue.max_attempts=1", "eval.endpoint={url: http://x/v1, model: m}"]
    given = load_config("calculator", place)
    assert given.eval.endpoint is not None
    with pytest.raises(QueueLost):
        evaluate_endpoint(given, given.eval.endpoint, "calculator", 1.0, tmp_path / "out.jsonl")
    said = capsys.readouterr().out
    assert "avg@k" in said and ("1 of 2" in said) == (done == 1)
    (run,) = tmp_path.glob("eval-*")
    assert len(read_trajectories(evaluation_file(run, EVAL_ID, whole=done == 2))) == done
    assert len(read_lines(tmp_path / "out.jsonl")) == done


async def test_a_lease_is_for_as_many_tasks_as_can_be_played_at_once(tmp_path: Path) -> None:
    asked = []

    class Counting(HeldOutSamples):
        async def lease(self, max_groups: int, wait_s: float) -> Leased:
            asked.append(max_groups)
            return await super().lease(max_groups, wait_s)

    async with Outside(READY, says("5")) as it:
        given = config(it, "agent.concurrency=4", "rollout.group_size=4")
        assert given.eval.endpoint is not None
        await play(given, given.eval.endpoint, Counting([TASK] * 4, given), tmp_path / "run")
    assert asked[0] == 4


def test_options_that_need_another_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (("--endpoint", "http://127.0.0.1:9/v1"), ("--model", "m")):
        with pytest.raises(SystemExit) as ended:
            main(["eval", "--config", "calculator", *options])
        assert ended.value.code == 2
    assert "--model" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["missing/out.jsonl", "."])
def test_a_place_where_no_lines_can_be_written_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for subject in (["model.path=none"], ["--endpoint", "http://127.0.0.1:9/v1", "--model", "m"]):
        assert main(["eval", "--config", "calculator", *subject, "--jsonl", place]) == EXIT_USER
        assert "--jsonl" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_training_run_takes_no_endpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = [f"launcher.run_dir={tmp_path}", "eval.endpoint={url: http://127.0.0.1:9/v1, model: m}"]
    assert main(["launch", "--config", "calculator", "--dry-run", *place]) == 2
    assert "eval.endpoint" in capsys.readouterr().err


def test_a_conversation_is_as_long_as_its_bytes() -> None:
    chat, messages = MessageLines(), [{"role": "user", "content": "é"}]
    length = len(chat.prompt(messages))
    assert length == len('[]\n{"role":"user","content":"é"}\n'.encode())
    with pytest.raises(TooLong):
        chat.prompt(messages, limit=length)


# ``rl-async reward test`` scores as a run does, and says which rule found what.


TERM = "reward.functions=[{name: exact_answer, extract: [[boxed, answer_tag], last_number]}]"


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows = [{"prompt": f"{n}+1?", "reward_model": {"ground_truth": str(n + 1)}} for n in range(3)]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)


def answers(folder: Path, *lines: object) -> str:
    file = folder / "answers.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(file)


def test_every_answer_gets_its_reward_and_its_reason(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = answers(
        tmp_path, {"answer": r"\boxed{x = 1}"}, "", {"answer": "it is 1", "row": 0}, {"answer": "\x1b", "row": 2}
    )
    assert main(["reward", "test", data, "--answers", file, TERM]) == 0
    out = capsys.readouterr().out
    blocks = out.split("row ")[1:]
    assert [block.splitlines()[0] for block in blocks] == ["0: reward 1", "0: reward 0", "2: reward 0"]
    assert 'boxed: "x = 1"' in blocks[0] and 'last_number: "1"' in blocks[0]
    assert "boxed or answer_tag: found nothing" in blocks[1]
    assert "mean reward 0.3333" in blocks[2]
    assert "\x1b" not in out


def test_the_configs_templates_apply_to_its_own_path(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "mine.yaml"
    part = {"path": data, "ground_truth": "{prompt}", "ground_truth_extract": ["regex:^(.)"]}
    config.write_text(json.dumps({"model": {"path": "none"}, "data": {"path": [part]}}))
    file = answers(tmp_path, {"answer": "2", "row": 2})
    assert main(["reward", "test", data, "--answers", file, "--config", str(config)]) == 0
    assert 'ground truth "2"' in capsys.readouterr().out


def test_an_answer_that_no_scorer_could_score_fails_the_command(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scorer = tmp_path / "mine.py"
    scorer.write_text("async def score(solution_str):\n    return 1 / float(solution_str)\n")
    file = answers(tmp_path, {"answer": "no"}, {"answer": "2"})
    assert main(["reward", "test", data, "--answers", file, f"reward.functions=[{{name: '{scorer}:score'}}]"]) == 1
    out = capsys.readouterr().out
    assert "not scored" in out and "2 answers, 1 scored, mean reward 0.5000" in out


@pytest.mark.parametrize(
    ("line", "named"),
    [('{"answer": 3}', "line 1"), ("yes", "line 1"), ('{"answer": "3", "row": 9}', "row 9"), ("", "is empty")],
)
def test_a_mistake_in_the_file_is_one_line(
    tmp_path: Path, data: str, line: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reward", "test", data, "--answers", answers(tmp_path, line)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: --answers") and named in captured.err and captured.err.count("\n") == 1
