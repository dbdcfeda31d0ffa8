"""The worker against a queue in memory: every leased sample is put or failed, and the end of the run ends it."""

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop import telemetry
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.environments.environment_registry import ENVIRONMENTS
from rl_async.agent_loop.episode import AsRecorded
from rl_async.agent_loop.gateway.server import run_gateway
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.agent_loop.telemetry import SamplesCollector
from rl_async.agent_loop.tools.tool import Step, Tool
from rl_async.agent_loop.worker import (
    FIRST_LINES,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    AgentWorker,
    Pauses,
    Repetitions,
    beginning,
    run_worker,
)
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.reward import JudgeConfig, RewardConfig, RewardTerm
from rl_async.configs.schema.rollout import AgentConfig, GatewayConfig, McpServerConfig, SpeakerConfig, TruncationConfig
from rl_async.configs.schema.run import QueueConfig, RunConfig
from rl_async.errors import ConfigError, DataError, EngineLost, EnvironmentFailed, QueueLost
from rl_async.messages import (
    Done,
    Leased,
    LeasedGroup,
    Refused,
    Renewed,
    SampleKey,
    Sampling,
    Task,
    Trajectory,
    Version,
    VersionRun,
    by_role,
)
from rl_async.process.http_auth import Access, make_tokens, run_token
from rl_async.process.role import bind
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.api import TIES, GenerateRequest, GenerateResult
from rl_async.transfer_queue.auth import provide_keys
from tests.conftest import make_rows
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config
from tests.unit.reward_loop.outside import Outside, says


class FakeQueue:
    """Leases the given groups once; the run is over when all samples are in and ``hold`` is not set."""

    def __init__(self, groups: Sequence[LeasedGroup], *, hold: bool = False) -> None:
        self.groups, self.hold = list(groups), hold
        self.wanted = sum(len(group.samples) for group in groups)
        self.rows: list[Trajectory] = []
        self.failures: list[tuple[int, int, str]] = []
        self.asked: list[int] = []
        self.renewed: list[list[SampleKey]] = []
        self.gone: list[SampleKey] = []
        self.changed, self.renewal = asyncio.Event(), asyncio.Event()

    async def lease(self, max_groups: int, wait_s: float) -> Leased:
        self.asked.append(max_groups)
        if self.groups:
            taken, self.groups = self.groups[:max_groups], self.groups[max_groups:]
            return Leased(groups=taken)
        while self.hold or len(self.rows) + len(self.failures) < self.wanted:
            self.changed.clear()
            await self.changed.wait()
        return Leased(groups=[], finished=True)

    async def renew(self, held: list[SampleKey]) -> Renewed:
        self.renewed.append(held)
        self.renewal.set()
        return Renewed(gone=self.gone)

    async def put(self, *rows: Trajectory, media: Mapping[str, bytes] | None = None) -> Done | Refused:
        self.rows += rows
        self.changed.set()
        return Refused(code="fenced", reason="late") if rows[0].sample == 99 else Done()

    async def fail(self, group_id: int, sample: int, attempt: int, error: str) -> Done | Refused:
        self.failures.append((group_id, sample, error))
        self.changed.set()
        return Done()


class Engine:
    """Answers 5 to everything after ``seconds``, and counts how many it serves at once."""

    def __init__(self, renderer: ChatRenderer, seconds: float = 0.0) -> None:
        self.spoken = [*renderer.encode("5"), renderer.end_of_turn]
        self.seconds, self.running, self.most, self.served = seconds, 0, 0, 0
        self.busy = asyncio.Event()

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        if session.startswith("7.2."):
            raise EngineLost("no engine answered")
        self.running += 1
        self.most = max(self.most, self.running)
        self.busy.set()
        await asyncio.sleep(self.seconds)
        self.running -= 1
        self.served += 1
        runs = [VersionRun(Version(), 0, len(self.spoken))]
        return GenerateResult(
            token_ids=self.spoken, logprobs=[-1.0] * len(self.spoken), versions=runs, finish_reason="stop"
        )


class StoppedAtOne(Engine):
    """An engine that never answers sample 1, and ends the queue's run once it is not waited for any more."""

    def __init__(self, renderer: ChatRenderer, queue: FakeQueue) -> None:
        super().__init__(renderer)
        self.queue = queue

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        if session.startswith("7.1."):
            try:
                await asyncio.Event().wait()
            finally:
                self.queue.hold = False
                self.queue.changed.set()
        return await super().generate(request, session=session)


async def run(
    queue: FakeQueue,
    renderer: ChatRenderer,
    engine: Engine,
    *,
    concurrency: int = 4,
    loop: str = "single_turn",
    **agent: Any,
) -> AgentWorker:
    async with RewardService(RewardConfig()) as rewards:
        config = run_config(**{"loop": loop, "concurrency": concurrency, "episode_timeout_s": 0.5, **agent})
        config = replace(config, rollout=replace(config.rollout, group_size=2), queue=QueueConfig(lease_s=0.04))
        worker = AgentWorker(queue, EpisodeRunner(config, renderer, engine), rewards, config)
        await worker.run()
    return worker


class Comparing:
    """Counts calls; the greatest reward is compared with the least."""

    def __init__(self) -> None:
        self.scored, self.compared = 0, list[list[int]]()

    async def score(self, task: Task, trajectory: Trajectory, *others: Trajectory, alone: bool = True) -> None:
        assert not alone
        self.scored += 1

    async def compare(self, task: Task, episodes: Sequence[Sequence[Trajectory]]) -> None:
        self.compared.append(sorted(rows[-1].sample for rows in episodes))
        for rows in episodes:
            rows[-1].reward = float(rows[-1].sample)


JUDGED = RewardConfig(functions=(RewardTerm("judge"),), judge=JudgeConfig(url="http://x", model="m", compare=True))


async def test_the_samples_of_a_lease_are_compared_once_and_need_no_slot_to_wait(renderer: ChatRenderer) -> None:
    """With one slot, a sample that kept it would wait for the others forever. The engine fails sample 2."""
    queue, rewards = FakeQueue([leased(samples=3), leased(samples=2)]), Comparing()
    config = replace(run_config({"group_size": 3}, loop="single_turn", concurrency=1), reward=JUDGED)
    async with asyncio.timeout(20):
        await AgentWorker(queue, EpisodeRunner(config, renderer, Engine(renderer)), rewards, config).run()
    assert rewards.compared == [[0, 1], [0, 1]] and rewards.scored == 4
    assert sorted(row.reward for row in queue.rows) == [0, 0, 1, 1]
    assert [sample for _, sample, _ in queue.failures] == [2]


async def test_a_sample_that_is_leased_alone_is_compared_with_new_answers_that_are_not_put(
    renderer: ChatRenderer,
) -> None:
    queue, rewards = FakeQueue([replace(leased(), samples=[1], attempt=2)]), Comparing()
    config = replace(run_config({"group_size": 2}, loop="single_turn", concurrency=1), reward=JUDGED)
    async with asyncio.timeout(20):
        worker = AgentWorker(queue, EpisodeRunner(config, renderer, Engine(renderer)), rewards, config)
        await worker.run()
    assert rewards.compared == [[0, 1]] and not queue.failures
    assert [(row.sample, row.reward) for row in queue.rows] == [(1, 1.0)] and worker.put == 1


async def test_opponents_count_among_the_conversations_that_a_worker_takes_on(renderer: ChatRenderer) -> None:
    class Queue(FakeQueue):
        async def lease(self, max_groups: int, wait_s: float) -> Leased:
            played.append(engine.served)
            return await super().lease(max_groups, wait_s)

    played, engine = list[int](), Engine(renderer, 0.01)
    queue = Queue([replace(leased(), samples=[1], attempt=2), replace(leased(), samples=[1], attempt=2)])
    config = replace(run_config({"group_size": 8}, loop="single_turn", concurrency=3), reward=JUDGED)
    async with asyncio.timeout(20):
        await AgentWorker(queue, EpisodeRunner(config, renderer, engine), Comparing(), config).run()
    # The engine serves seven of eight conversations; the next lease waits until two are left.
    assert played[0] == 0 and played[1] >= 5
    assert queue.asked[:2] == [1, 1]


async def test_an_opponent_that_is_lost_leaves_the_others_to_be_compared(renderer: ChatRenderer) -> None:
    """The code of one gives up the task that plays it, and the engine fails the other."""

    class GivesUp(EpisodeRunner):
        async def run(self, group: LeasedGroup, sample: int, *more: Any) -> list[Trajectory]:
            if sample == 3:
                raise asyncio.CancelledError
            return await super().run(group, sample, *more)

    queue, rewards = FakeQueue([replace(leased(), samples=[0, 1], attempt=2)]), Comparing()
    config = replace(run_config({"group_size": 4}, loop="single_turn", concurrency=1), reward=JUDGED)
    async with asyncio.timeout(20):
        await AgentWorker(queue, GivesUp(config, renderer, Engine(renderer)), rewards, config).run()
    assert rewards.compared == [[0, 1]] and sorted(row.sample for row in queue.rows) == [0, 1]


class Truncating(Engine):
    """Names as kept, if asked, the token that it says and, before it, the next one."""

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        assert request.sampling == Sampling(1.0, 0.9, 4)
        kept = [[(token + 1, -1.0), (token, -1.0)] for token in self.spoken if request.alternatives == 4 + TIES]
        return replace(await super().generate(request, session=session), alternatives=kept)


@pytest.mark.parametrize("partition", ["train", "eval"])
async def test_rows_to_train_on_name_the_tokens_that_the_sampler_kept(renderer: ChatRenderer, partition: str) -> None:
    queue, engine = FakeQueue([leased(partition=partition)]), Truncating(renderer)
    config = run_config({"truncation": TruncationConfig(top_k=4, top_p=0.9)}, loop="single_turn")
    config = replace(config, eval=replace(config.eval, temperature=1.0))
    async with asyncio.timeout(20), RewardService(RewardConfig()) as rewards:
        await AgentWorker(queue, EpisodeRunner(config, renderer, engine), rewards, config).run()
    (row,) = queue.rows
    row.header()
    if partition == "eval":
        assert row.kept_tokens is None
    else:
        assert row.kept_tokens.tolist() == [[token, token + 1] for token in engine.spoken]


class Unreadable:
    async def run(self, group: LeasedGroup, sample: int, images: dict[str, bytes]) -> list[Trajectory]:
        raise ConfigError("its rows are gone")


class OneRow:
    async def run(self, group: LeasedGroup, sample: int, images: dict[str, bytes]) -> list[Trajectory]:
        return make_rows(0, 1, 1)


class Refusing(FakeQueue):
    code = "reward"

    async def put(self, *rows: Trajectory, media: Mapping[str, bytes] | None = None) -> Done | Refused:
        await super().put(*rows)
        return Refused(code=self.code, reason="no")


@pytest.mark.parametrize("runner", [Unreadable(), OneRow()])
async def test_a_recorded_sample_that_cannot_be_handed_in_ends_the_run(runner: Unreadable | OneRow) -> None:
    queue = Refusing([leased()], hold=True)
    config = run_config(rollout={"replay": "runs/before"})
    with pytest.raises(ExceptionGroup) as ended:
        await AgentWorker(queue, runner, AsRecorded(), config).run()
    assert ended.group_contains(ConfigError) and queue.failures == []


async def test_a_recorded_sample_that_is_no_longer_wanted_ends_nothing() -> None:
    queue = Refusing([leased()])
    queue.code = "fenced"
    await AgentWorker(queue, OneRow(), AsRecorded(), run_config(rollout={"replay": "runs/before"})).run()
    assert len(queue.rows) == 1


async def test_every_sample_is_put_or_failed(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased(samples=5), leased(samples=3, ground_truth="6")])
    worker = await run(queue, renderer, Engine(renderer))
    assert sorted((row.sample, row.reward) for row in queue.rows) == [
        (0, 0.0),
        (0, 1.0),
        (1, 0.0),
        (1, 1.0),
        (3, 1.0),
        (4, 1.0),
    ]
    assert queue.failures == [(7, 2, "EngineLost: no engine answered")] * 2
    assert (worker.put, worker.failed, worker.refused) == (6, 2, 0)


async def test_rows_say_whether_their_episode_has_a_trace(renderer: ChatRenderer) -> None:
    queue = FakeQueue([replace(leased(samples=2), traced=[1])])
    await run(queue, renderer, Engine(renderer))
    assert {row.sample: row.traced for row in queue.rows} == {0: False, 1: True}
    assert {row.sample: row.header().traced for row in queue.rows} == {0: False, 1: True}


REWARDS_THE_FIRST_TURN = """
async def rewards_the_first_turn(episode):
    await episode.generate()
    episode.add([{"role": "user", "content": "sure?"}])
    reason = await episode.generate()
    episode.turns[1].reward = float(episode.task.ground_truth)
    return reason
"""


@pytest.mark.parametrize("past", ["keep", "split"])
async def test_a_turn_reward_that_is_no_number_leaves_every_row_unscored(
    renderer: ChatRenderer, tmp_path: Path, past: str
) -> None:
    (tmp_path / "loop.py").write_text(REWARDS_THE_FIRST_TURN)
    queue = FakeQueue([leased(samples=1, ground_truth=truth) for truth in ("nan", "5")])
    loop = f"{tmp_path}/loop.py:rewards_the_first_turn"
    await run(queue, renderer, Engine(renderer), loop=loop, past_reasoning=past, episode_timeout_s=60.0)
    each = 1 if past == "keep" else 2
    assert sorted((row.ground_truth, row.scored, row.reward) for row in queue.rows) == [
        *[("5", True, 1.0)] * each,
        *[("nan", False, 0.0)] * each,
    ]
    assert [row.turns[1].reward for row in queue.rows if row.ground_truth == "5" and row.segment == 0] == [5.0]


async def test_concurrency_bounds_conversations_and_leases(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased(samples=2) for _ in range(10)])
    engine = Engine(renderer, 0.005)
    await run(queue, renderer, engine, concurrency=4)
    assert engine.most == 4
    assert queue.asked[0] == 2
    assert max(queue.asked) == 2
    assert queue.renewed


async def test_renewals_list_what_is_played(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased(samples=3)], hold=True)
    running = asyncio.create_task(run(queue, renderer, Engine(renderer, seconds=0.2)))
    async with asyncio.timeout(10):
        while [] not in queue.renewed:
            queue.renewal.clear()
            await queue.renewal.wait()
    assert [(7, 0, 1), (7, 1, 1)] in queue.renewed  # the engine is lost for sample 2 at once
    queue.hold = False
    queue.changed.set()
    await running


async def test_a_sample_that_another_worker_plays_is_stopped(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased(samples=2)], hold=True)
    queue.gone, queue.wanted = [(7, 1, 1)], 1
    async with asyncio.timeout(30):
        await run(queue, renderer, StoppedAtOne(renderer, queue), episode_timeout_s=60.0)
    assert ([row.sample for row in queue.rows], queue.failures) == ([0], [])


async def test_an_episode_that_cancels_itself_has_failed(renderer: ChatRenderer, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("import asyncio\nasync def quits(episode):\n    raise asyncio.CancelledError\n")
    queue = FakeQueue([leased(samples=2)])
    await run(queue, renderer, Engine(renderer), loop=f"{tmp_path}/loop.py:quits")
    assert len(queue.failures) == 2 and "CancelledError" in queue.failures[0][2]


@pytest.mark.parametrize(
    "body",
    [
        "raise SystemExit(3)",
        "raise KeyboardInterrupt",
        "raise GeneratorExit",
        "raise type('Own', (BaseException,), {})()",
        "raise ValueError('half a pair: \\ud800')",
        "raise type('Own', (Exception,), {'__str__': lambda self: 1 / 0})()",
        "raise ValueError('x' * 10_000_000)",
    ],
)
async def test_whatever_a_loop_raises_fails_its_sample_alone(renderer: ChatRenderer, tmp_path: Path, body: str) -> None:
    (tmp_path / "loop.py").write_text(f"async def ends(episode):\n    {body}\n")
    queue = FakeQueue([leased(samples=2)])
    await run(queue, renderer, Engine(renderer), loop=f"{tmp_path}/loop.py:ends")
    assert len(queue.failures) == 2
    assert all(len(error.encode()) < 10_000 for _, _, error in queue.failures)


async def test_late_rows_are_counted(renderer: ChatRenderer) -> None:
    group = leased(samples=1)
    group.samples = [99]
    assert (await run(FakeQueue([group]), renderer, Engine(renderer))).refused == 1


async def test_errors_of_users_loops_fail_the_sample(renderer: ChatRenderer, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("async def bad(episode):\n    return episode.nothing\n")
    queue = FakeQueue([leased(samples=1)])
    await run(queue, renderer, Engine(renderer), loop=f"{tmp_path}/bad.py:bad")
    assert "AttributeError" in queue.failures[0][2]


async def test_a_loop_that_returns_no_reason_fails_its_sample_and_is_named(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    (tmp_path / "forgets.py").write_text("async def forgets(episode):\n    await episode.generate()\n")
    queue = FakeQueue([leased(samples=2)])
    await run(queue, renderer, Engine(renderer), loop=f"{tmp_path}/forgets.py:forgets")
    assert len(queue.failures) == 2 and queue.rows == []
    assert re.match(r"ConfigError: agent\.loop: .*forgets\.py:forgets returned None", queue.failures[0][2])


FAILS = """
async def fails(episode):
    if episode.task.ground_truth == "6":
        raise ValueError("six")
    raise RuntimeError("loop broke")
"""


async def test_the_log_has_one_traceback_of_errors_that_are_alike(
    renderer: ChatRenderer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    queue = FakeQueue([leased(samples=3), leased(samples=2, ground_truth="6")])
    await run(queue, renderer, Engine(renderer), loop=f"{tmp_path}/fails.py:fails")
    assert len(queue.failures) == 5
    told = [entry for entry in caplog.records if entry.levelname == "ERROR"]
    whole = [entry.exc_info[0] for entry in told if entry.exc_info]
    assert len(told) == 5 and sorted(map(str, whole)) == sorted(map(str, (RuntimeError, ValueError)))
    assert all("loop broke" in text or "six" in text for text in (e.getMessage() for e in told if not e.exc_info))


async def test_failures_that_are_alike_do_not_flood_the_log(
    renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    queue = FakeQueue([leased("much too long " * 100, samples=1, task_id=f"t:{number}") for number in range(20)])
    await run(queue, renderer, Engine(renderer), max_tokens=64)
    assert len(queue.failures) == 20
    told = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert len(told) == FIRST_LINES + 3 and "16 times" in told[-1]


def test_leases_wait_longer_and_longer_while_samples_only_fail() -> None:
    pauses = Pauses()
    assert pauses.after(0, 0) == 0.0
    assert [pauses.after(0, failed) for failed in (1, 9, 10)] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses.after(0, 10) == 0.0, "nothing has ended since"
    assert pauses.after(0, 11) == 8 * FIRST_PAUSE_S
    assert max(pauses.after(0, failed) for failed in range(12, 30)) == pauses.after(0, 30) == LONGEST_PAUSE_S
    assert pauses.after(1, 40) == pauses.after(2, 40) == 0.0, "one succeeded"
    assert pauses.after(2, 41) == FIRST_PAUSE_S


async def test_before_a_lease_the_worker_waits_as_its_failures_demand(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    counted, slept, sleep = list[tuple[int, int]](), list[float](), asyncio.sleep
    monkeypatch.setattr(Pauses, "after", lambda self, put, failed: counted.append((put, failed)) or 1234.5)

    async def sleep_no_time(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0.0 if seconds == 1234.5 else seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep_no_time)
    groups = [leased(samples=2) for _ in range(3)]
    await run(FakeQueue(groups), renderer, Engine(renderer), concurrency=2, loop=f"{tmp_path}/fails.py:fails")
    assert counted[0] == (0, 0) and counted[-1][0] == 0 and counted[-1][1] > 0
    assert slept.count(1234.5) == len(counted)


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (
            "await asyncio.sleep(60)",
            "EpisodeTimeout: .*agent.episode_timeout_s",
        ),
        ("raise TimeoutError('own')", "TimeoutError: own"),
    ],
)
async def test_a_users_loop_that_hangs_fails_its_sample(
    renderer: ChatRenderer, tmp_path: Path, error: str, named: str
) -> None:
    (tmp_path / "hangs.py").write_text(f"import asyncio\nasync def hangs(episode):\n    {error}\n")
    queue = FakeQueue([leased(samples=1)])
    await run(queue, renderer, Engine(renderer), loop=f"{tmp_path}/hangs.py:hangs")
    (failure,) = queue.failures
    assert re.match(named, failure[2])


@pytest.mark.parametrize(("begins", "partition"), [(True, "train"), (False, "train"), (True, "eval")])
async def test_a_training_episode_out_of_time_is_kept_as_far_as_it_came(
    renderer: ChatRenderer, tmp_path: Path, begins: bool, partition: str
) -> None:
    turn = "await episode.generate()" if begins else "pass"
    code = f"import asyncio\nasync def hangs(episode):\n    {turn}\n    await asyncio.Event().wait()\n"
    (tmp_path / "hangs.py").write_text(code)
    queue = FakeQueue([replace(leased(samples=1), partition=partition)])
    await run(queue, renderer, Engine(renderer), loop=f"{tmp_path}/hangs.py:hangs", on_timeout="truncate")
    if begins and partition == "train":
        (row,) = queue.rows
        assert (row.finish_reason, row.segment, int(row.loss_mask.sum())) == ("timeout", 0, 2)
        assert not queue.failures
    else:
        assert queue.failures[0][2].startswith("EpisodeTimeout: ") and not queue.rows


async def test_an_environment_that_hangs_gives_nothing_for_an_episode_that_is_kept(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    hangs = "async def step(self, answer):\n        import asyncio\n        await asyncio.Event().wait()"
    (tmp_path / "env.py").write_text(f"class Hangs:\n    def __init__(self, task): pass\n    {hangs}\n")
    queue = FakeQueue([leased(samples=1)])
    await run(queue, renderer, Engine(renderer), environment=f"{tmp_path}/env.py:Hangs", on_timeout="truncate")
    (row,) = queue.rows
    assert (row.finish_reason, row.reward_parts["environment"]) == ("timeout", 0.0)


async def test_a_lost_queue_ends_the_worker(renderer: ChatRenderer) -> None:
    class Gone(FakeQueue):
        async def put(self, *rows: Trajectory, media: Mapping[str, bytes] | None = None) -> Done | Refused:
            raise QueueLost("no answer")

    with pytest.raises(ExceptionGroup) as caught:
        await run(Gone([leased(samples=1)]), renderer, Engine(renderer))
    assert caught.value.subgroup(QueueLost) is not None


async def test_cancelling_ends_conversations(renderer: ChatRenderer) -> None:
    queue, engine = FakeQueue([leased(samples=2)], hold=True), Engine(renderer, 60.0)
    task = asyncio.create_task(run(queue, renderer, engine))
    await engine.busy.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not queue.rows


def test_of_failures_that_are_alike_ever_fewer_get_a_line() -> None:
    repetitions = Repetitions()
    told = [times for _ in range(20) if (times := repetitions.another("one"))]
    assert told == [*range(1, FIRST_LINES + 1), 4, 8, 16]
    assert repetitions.another("other") == 1


def test_errors_that_differ_in_numbers_begin_alike() -> None:
    assert beginning("sample 3.1 took 20 s") == beginning("sample 14.0 took 7 s") != beginning("sample 3.1 broke")


# A worker and a gateway, up to the first request to a queue that is not there.


KEY, SERVERS_KEY = "RL_ASYNC_TEST_JUDGE_KEY", "RL_ASYNC_TEST_MCP_KEY"


async def worker(config: RunConfig, queue: str, folder: Path) -> None:
    await run_worker(config, 0, queue, folder=folder)


async def gateway(config: RunConfig, queue: str, folder: Path, listener: socket.socket | None = None) -> None:
    access = Access.of_run(folder, "gateway", ())
    with listener or bind("127.0.0.1", 0, "agent.gateway") as listening:
        await run_gateway(config, listening, access, queue, folder=folder, reward_model="")


@pytest.fixture
def config(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Of a run in ``tmp_path`` whose judge has a key."""
    monkeypatch.setenv(KEY, "secret")
    tokenizer.save_pretrained(tmp_path / "model")
    judge = JudgeConfig(url="http://127.0.0.1:1/v1", model="m", api_key_env=KEY)
    config = RunConfig(
        model=ModelConfig(path=str(tmp_path / "model")),
        data=DataConfig(path="none"),
        agent=AgentConfig(gateway=GatewayConfig()),
        reward=RewardConfig(functions=(RewardTerm(name="judge"),), judge=judge),
    )
    provide_keys(config, tmp_path)
    make_tokens(tmp_path / "keys")
    return config


async def ended(running: asyncio.Task[None]) -> None:
    """Cancel a role, which is still at work."""
    running.cancel()
    assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], asyncio.CancelledError)


async def forgets(role: Any, config: RunConfig, folder: Path, *keys: str) -> None:
    """Start a role; return when these variables have left the environment."""
    running = asyncio.create_task(role(config, f"ipc://{folder}/nobody", folder))
    async with asyncio.timeout(10):
        while not os.environ.keys().isdisjoint(keys) and not running.done():  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(0.01)
    await ended(running)
    assert os.environ.keys().isdisjoint(keys)


@pytest.mark.parametrize("role", [worker, gateway])
async def test_keys_leave_the_environment_once_they_are_read(role: Any, config: RunConfig, tmp_path: Path) -> None:
    await forgets(role, config, tmp_path, KEY)


async def test_keys_of_mcp_servers_leave_it_too(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.asynccontextmanager
    async def connected(agent: AgentConfig, logs: Path, owner: str) -> AsyncIterator[None]:
        assert os.environ[SERVERS_KEY] == "another", "servers read it"
        yield

    monkeypatch.setenv(SERVERS_KEY, "another")
    monkeypatch.setattr("rl_async.agent_loop.worker.connect_servers", connected)
    server = McpServerConfig(url="http://127.0.0.1:1", headers_from={"Authorization": SERVERS_KEY})
    agent = AgentConfig(mcp=(server,), unprinted_tools="allow")
    await forgets(worker, replace(config, agent=agent), tmp_path, KEY, SERVERS_KEY)


async def test_a_gateway_refuses_requests_without_its_token(config: RunConfig, tmp_path: Path) -> None:
    listener = bind("127.0.0.1", 0, "agent.gateway")
    listener.listen()
    running = asyncio.create_task(gateway(config, f"ipc://{tmp_path}/nobody", tmp_path, listener))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/models"
    own, engines = (run_token(tmp_path, audience) for audience in ("gateway", "engines"))
    async with aiohttp.ClientSession() as session:
        for token, refused in ((None, True), (engines, True), (own, False)):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with session.get(url, headers=headers) as response:
                assert (response.status == 401) == refused
    await ended(running)


# Episodes of several roles: who is told what, whose tokens train, what each earns, and how a game ends.


COUNT = '<tool_call>\n{"name":"count","arguments":{"text":"plum"}}\n</tool_call>'


class Whisper:
    """The speaker is told a word and says it; the listener answers what it heard, twice, as long as it is wrong."""

    roles: Any = ("speaker", "listener")
    ended = 0

    def __init__(self, task: Task, host: object) -> None:
        self.word, self.spoken, self.wrong = task.ground_truth, False, 0

    def reset(self) -> Step:
        return Step(f"say {self.word}", to="speaker")

    def step(self, answer: str) -> Step:
        if not self.spoken:
            self.spoken = True
            return Step(answer, to="listener", reward=0.25, reason="said")
        if answer == self.word:
            return Step(done=True)
        self.wrong, self.spoken = self.wrong + 1, False
        return Step(f"no, {answer} is wrong", to="speaker", reward=-0.5, reason="wrong")

    def reward(self) -> Any:
        return {"speaker": 1.0 - self.wrong, "listener": {"score": 2.0 - self.wrong, "wrong": self.wrong}}

    def close(self) -> None:
        Whisper.ended += 1


async def play(
    renderer: ChatRenderer,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    says: Sequence[str],
    opponents: dict[str, SpeakerConfig] | None = None,
    **agent: Any,
) -> tuple[list[Trajectory], ScriptedEngine]:
    monkeypatch.setitem(ENVIRONMENTS, "own", kind)
    config: RunConfig = run_config(environment="own", opponents=opponents or {}, **{"max_turns": 6, **agent})
    engine = ScriptedEngine(renderer, says)
    runner = EpisodeRunner(config, renderer, engine)
    try:
        return await runner.run(leased("a game", ground_truth="plum"), 0), engine
    finally:
        await runner.close()


def said(row: Trajectory) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in row.turns]


async def test_each_role_has_a_conversation_rows_and_a_reward(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = Whisper.ended
    rows, engine = await play(renderer, monkeypatch, Whisper, ["pear", "pear", "plum", "plum"])
    speaker, listener = rows
    assert [(row.role, row.segment, row.episode_id, row.finish_reason) for row in rows] == [
        ("speaker", 0, "7.0.1", "stop"),
        ("listener", 1, "7.0.1", "stop"),
    ]
    assert said(speaker) == [
        *(("user", "a game\n\nsay plum"), ("assistant", "pear")),
        *(("user", "no, pear is wrong"), ("assistant", "plum")),
    ]
    assert said(listener) == [
        *(("user", "a game\n\npear"), ("assistant", "pear"), ("user", "plum"), ("assistant", "plum")),
    ]
    assert [(turn.reward, turn.reason) for turn in speaker.turns[1::2]] == [(0.25, "said"), (0.25, "said")]
    assert [(turn.reward, turn.reason) for turn in listener.turns[1::2]] == [(-0.5, "wrong"), (None, "")]
    assert speaker.reward_parts == {"environment": 0.0}
    assert listener.reward_parts == {"environment": 1.0, "environment/wrong": 1.0}
    for row, words in ((speaker, "pear<|im_end|>plum<|im_end|>"), (listener, "pear<|im_end|>plum<|im_end|>")):
        assert renderer.decode(row.token_ids[row.loss_mask].tolist()) == words
    assert engine.sessions == ["7.0.1.speaker", "7.0.1.listener"] * 2, "each has a prefix cache of its own"
    assert len({request.request_id for request in engine.requests}) == 4
    assert Whisper.ended == before + 1
    assert "differ from the chat template" not in caplog.text


async def test_a_role_without_turns_left_ends_the_game_for_all(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = await play(renderer, monkeypatch, Whisper, ["pear"] * 4, max_turns=2)
    assert [(row.role, row.finish_reason) for row in rows] == [("speaker", "max_turns"), ("listener", "stop")]
    assert rows[1].turns[-1].reward == -0.5, "the last turn is judged"


async def test_a_turn_that_is_cut_off_ends_the_game(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, engine = await play(renderer, monkeypatch, Whisper, ["plum", "pear " * 200])
    assert [(row.role, row.finish_reason) for row in rows] == [("speaker", "stop"), ("listener", "length")]
    assert rows[1].turns[-1].reward is None, "it was not judged"
    assert len(engine.requests) == 2


async def test_a_role_that_has_no_turn_has_no_row(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone(Whisper):
        def step(self, answer: str) -> Step:
            return Step(done=True, reward=1.0)

    rows, _ = await play(renderer, monkeypatch, Alone, ["plum"])
    assert [(row.role, row.segment) for row in rows] == [("speaker", 0)]
    with pytest.raises(EnvironmentFailed, match="listener"):
        await play(renderer, monkeypatch, Alone, ["plum"], opponents={"speaker": SpeakerConfig()})


async def test_one_reward_is_that_of_all_roles(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Together(Whisper):
        def reward(self) -> Any:
            return {"score": 0.5, "wrong": self.wrong}

    rows, _ = await play(renderer, monkeypatch, Together, ["plum", "plum"])
    assert [row.reward_parts for row in rows] == [{"environment": 0.5, "environment/wrong": 0.0}] * 2

    class Turns(Whisper):
        reward: Any = property()  # hasattr is false

    rows, _ = await play(renderer, monkeypatch, Turns, ["plum", "plum"])
    assert [row.reward_parts for row in rows] == [{"environment": 0.0}] * 2


async def test_a_role_may_begin_with_a_system_message_of_its_own(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(Whisper):
        def reset(self) -> Step:
            told = [{"role": "system", "content": "you speak"}, {"role": "user", "content": "say plum"}]
            return Step(told, to="speaker")

    (speaker, listener), _ = await play(renderer, monkeypatch, Own, ["plum", "plum"])
    assert said(speaker)[:2] == [("system", "you speak"), ("user", "say plum")]
    assert said(listener)[0] == ("user", "a game\n\nplum")


class Counting(Whisper):
    def tools(self) -> Any:
        def count(text: str) -> Step:
            """Count letters."""
            return Step(str(len(text)), reward=0.125, reason="counted")

        return {"listener": [Tool(count)]}


async def test_roles_have_tools_of_their_own(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    (speaker, listener), _ = await play(renderer, monkeypatch, Counting, [COUNT, "plum", COUNT, "plum"], max_tokens=250)
    assert speaker.turns[1].tool_calls[0].error == "unknown tool"
    assert listener.turns[1].tool_calls[0].result == "4"
    assert (listener.turns[1].reward, listener.turns[1].reason) == (0.125, "counted")


async def test_an_opponent_at_a_server_plays_a_role_and_trains_nothing(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Outside(says("pear"), says("plum")) as it:
        opponents = {"speaker": SpeakerConfig(url=f"{it.url}/v1", model="m")}
        (row,), engine = await play(renderer, monkeypatch, Whisper, ["pear", "plum"], opponents=opponents)
    assert (row.role, row.segment, row.reward_parts["environment"]) == ("listener", 0, 1.0)
    assert [turn.text for turn in row.turns] == ["a game\n\npear", "pear", "plum", "plum"]
    assert [(m["role"], m["content"]) for m in it.asked[-1].body["messages"]] == [
        *(("user", "a game\n\nsay plum"), ("assistant", "pear"), ("user", "no, pear is wrong")),
    ]
    assert engine.sessions == ["7.0.1.listener"] * 2


async def test_the_policy_itself_may_be_an_opponent(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    opponents = {"listener": SpeakerConfig(temperature=0.5)}
    (row,), engine = await play(renderer, monkeypatch, Whisper, ["plum", "plum"], opponents=opponents)
    assert row.role == "speaker"
    assert [request.sampling.temperature for request in engine.requests] == [1.0, 0.5]


async def test_an_opponent_without_turns_left_ends_the_game(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opponents = {"speaker": SpeakerConfig()}
    (row,), engine = await play(renderer, monkeypatch, Whisper, ["pear"] * 9, opponents=opponents, max_turns=2)
    assert (len(engine.requests), row.finish_reason) == (4, "stop")


@pytest.mark.parametrize(
    ("opponents", "kind", "named"),
    [
        (["umpire"], Whisper, "umpire"),
        (["speaker", "listener"], Whisper, "all roles"),
        (["listener"], Counting, "tools"),
        (["listener"], type("Plain", (Whisper,), {"roles": ()}), "no roles"),
    ],
)
async def test_opponents_that_make_no_sense_are_refused(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, opponents: list[str], kind: Any, named: str
) -> None:
    if not kind.roles:
        monkeypatch.setattr(kind, "reset", lambda self: "go")
    with pytest.raises(ConfigError, match=rf"agent\.opponents: .*{named}"):
        await play(renderer, monkeypatch, kind, ["plum"], opponents=dict.fromkeys(opponents, SpeakerConfig()))


@pytest.mark.parametrize("opponents", [["umpire"], ["one", "two"]])
def test_opponents_are_checked_against_a_class_that_names_its_roles_before_any_episode(
    renderer: ChatRenderer, tmp_path: Path, opponents: list[str]
) -> None:
    (tmp_path / "game.py").write_text('class Two:\n    roles = ("one", "two")\n')
    made = {role: SpeakerConfig() for role in opponents}
    config = run_config(environment=f"{tmp_path}/game.py:Two", opponents=made)
    with pytest.raises(ConfigError, match=r"agent\.opponents"):
        EpisodeRunner(config, renderer, ScriptedEngine(renderer, []))


@pytest.mark.parametrize("roles", ["speaker", ("speaker", "speaker"), ("a b",), ("score",), (3,), {"a": 1}])
async def test_roles_are_different_names(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, roles: Any) -> None:
    with pytest.raises(EnvironmentFailed, match="roles"):
        await play(renderer, monkeypatch, type("Odd", (Whisper,), {"roles": roles}), ["plum"])


@pytest.mark.parametrize(
    ("method", "answer", "named"),
    [
        ("reset", "say plum", r"reset\(\).*Step"),
        ("reset", Step(done=True), r"reset\(\).*first"),
        ("reset", Step("say plum"), r"reset\(\).*speaker, listener"),
        ("step", Step("hm", to="umpire"), r"step\(\).*speaker, listener"),
        ("step", Step(to="speaker"), r"step\(\).*speaker has had a turn"),
        ("step", Step([{"role": "assistant", "content": "plum"}], to="listener"), r"step\(\).*assistant"),
        ("reward", {"speaker": 1.0}, r"reward\(\).*each role"),
        ("reward", {"speaker": 1.0, "listener": "much"}, r"reward\(\).*much"),
        ("reward", {"umpire": 1.0}, r"reward\(\)"),
        ("tools", {"umpire": []}, r"tools\(\).*umpire"),
    ],
)
async def test_what_a_game_may_not_return(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, method: str, answer: Any, named: str
) -> None:
    before = Whisper.ended
    kind = type("Odd", (Whisper,), {method: lambda self, *_: answer})
    with pytest.raises(EnvironmentFailed, match=named):
        await play(renderer, monkeypatch, kind, ["plum", "plum"])
    assert Whisper.ended == before + 1, "it is closed"


async def test_what_a_loop_of_a_role_raises_fails_the_episode_as_it_is(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(IndexError):  # the engine has no more to say
        await play(renderer, monkeypatch, Whisper, ["pear"])


async def test_rows_are_put_together_by_role(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = await play(renderer, monkeypatch, Whisper, ["pear", "pear", "plum", "plum"])
    assert [[row.role for row in own] for own in by_role(rows)] == [["speaker"], ["listener"]]


class Chatter(Whisper):
    """What a role is told goes on for long."""

    def step(self, answer: str) -> Step:
        return super().step(answer)._replace(observation="pear " * 9000)


@pytest.mark.parametrize("opponents", [(), ("listener",)])
async def test_words_of_a_game_that_are_too_long_end_it(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, opponents: tuple[str, ...]
) -> None:
    made = dict.fromkeys(opponents, SpeakerConfig())
    (row,), engine = await play(renderer, monkeypatch, Chatter, ["plum"], made)
    assert (row.role, row.finish_reason, len(engine.requests)) == ("speaker", "stop", 1)
    assert row.reward_parts == {"environment": 1.0}, "the game says what it was worth"


async def test_a_task_that_is_too_long_is_an_error_of_the_data(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="t:0"):
        await play(renderer, monkeypatch, Whisper, ["plum"], max_tokens=3)


@pytest.mark.parametrize("served", [False, True])
async def test_a_turn_of_an_opponent_that_is_cut_off_ends_the_game(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    async with Outside(says("pea", finish_reason="length")) as it:
        listener = SpeakerConfig(url=f"{it.url}/v1", model="m") if served else SpeakerConfig(max_tokens=4)
        (row,), _ = await play(renderer, monkeypatch, Whisper, ["plum", "pear " * 200], {"listener": listener})
    assert (row.role, row.finish_reason) == ("speaker", "stop")
    assert row.reward_parts == {"environment": 1.0}, "the wrong answer was not judged"


async def test_tools_are_asked_for_once_and_after_reset(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Ordered(Whisper):
        def reset(self) -> Step:
            calls.append("reset")
            return super().reset()

        def tools(self) -> Any:
            calls.append("tools")
            return {}

    await play(renderer, monkeypatch, Ordered, ["plum", "plum"], {"listener": SpeakerConfig()})
    assert calls == ["reset", "tools"]


@pytest.mark.parametrize(
    ("says", "setter", "guesser"),
    [
        (["7", "3", "7"], -1.0, 1.0),
        (["7", "1", "2", "3"], 1.0, -1.0),
        (["7", "1 " * 200], 1.0, -1.0),
        (["77"], -1.0, None),
        (["plum"], -1.0, None),
        (["1 " * 200], -1.0, None),
    ],
)
async def test_the_game_of_the_documentation_pays_for_no_foul(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, says: list[str], setter: float, guesser: float | None
) -> None:
    text = (Path(__file__).parents[3] / "docs/how-to/environments.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Duel" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    rows, _ = await play(renderer, monkeypatch, lambda task, services: names["Duel"](task), says)
    rewards = {"setter": setter} | ({} if guesser is None else {"guesser": guesser})
    assert {row.role: row.reward_parts["environment"] for row in rows} == rewards


# What Prometheus hears of episodes: durations, failures and tokens of their parts, and samples by how they ended.


@pytest.fixture
def from_zero() -> None:
    for instrument in (telemetry.SECONDS, telemetry.ERRORS, telemetry.TOKENS):
        instrument.clear()
    telemetry._part.cache_clear()
    telemetry._tokens.cache_clear()


def value(sample: str, /, **labels: str) -> float | None:
    registry = CollectorRegistry()
    counts = SimpleNamespace(put=3, failed=1, refused=0, held=2)
    registry.register(SamplesCollector(counts))
    return registry.get_sample_value(sample, labels)


def tool(name: str, *, error: bool = False) -> None:
    with telemetry.of_tool("1.0.0", name, "") as about:
        about |= {"error.type": "tool_error"} if error else {}


@pytest.mark.usefixtures("from_zero")
def test_a_tool_counts_by_its_name_and_so_do_its_failures() -> None:
    tool("search")
    tool("search", error=True)
    tool("python")
    with pytest.raises(KeyError), telemetry.of_tool("1.0.0", "python", ""):
        raise KeyError
    for name, calls in (("search", 2), ("python", 2)):
        labels = {"operation": "execute_tool", "name": name}
        assert value("rl_async_agent_seconds_count", **labels) == calls
        assert value("rl_async_agent_errors_total", **labels) == 1


@pytest.mark.usefixtures("from_zero")
def test_what_is_cancelled_at_the_end_of_a_run_has_not_failed() -> None:
    with pytest.raises(asyncio.CancelledError), telemetry.of_tool("1.0.0", "search", ""):
        raise asyncio.CancelledError
    assert value("rl_async_agent_errors_total", operation="execute_tool", name="search") == 0


@pytest.mark.usefixtures("from_zero")
def test_tokens_of_an_answer_are_counted() -> None:
    request = GenerateRequest(request_id="r", token_ids=[1, 2, 3], sampling=Sampling(), max_tokens=8, stop_token_ids=[])
    with telemetry.of_chat("1.0.0", "models/m", request) as sampled:
        sampled(GenerateResult(token_ids=[4, 5], logprobs=[0.0, 0.0], versions=[], finish_reason="stop"))
    assert value("rl_async_agent_tokens_total", kind="input") == 3
    assert value("rl_async_agent_tokens_total", kind="output") == 2
    assert value("rl_async_agent_seconds_count", operation="chat", name="") == 1


@pytest.mark.usefixtures("from_zero")
def test_samples_are_those_of_the_worker() -> None:
    assert value("rl_async_agent_samples_total", outcome="put") == 3
    assert value("rl_async_agent_samples_total", outcome="failed") == 1
    assert value("rl_async_agent_samples_held") == 2
