"""Episodes of several rows from a worker through a real queue: each sample is admitted whole, and its rows are what the
engine was sent and what it sampled."""

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.agent_loop.worker import AgentWorker
from rl_async.configs.schema.reward import RewardConfig
from rl_async.configs.schema.rollout import PastReasoning
from rl_async.messages import Reserved, Task, Trajectory, Version, VersionRun
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.transfer_queue import QueueClient, SyncQueueClient, serve
from tests.support.tiny_models import byte_tokenizer
from tests.unit.agent_loop.fakes import run_config
from tests.unit.agent_loop.test_episode import TEMPLATE

LOOP = """
async def asks_again(episode):
    for _ in range(2):
        await episode.generate()
        episode.add([{"role": "user", "content": "sure?"}])
    return await episode.generate()
"""
SAYS = "<think>\nin turn {turn}\n</think>\n\n{turn}"
GROUPS, SAMPLES = 2, 2


class Engine:
    """Reasons, says the number of the turn, and keeps what passed by conversation."""

    def __init__(self, chat: ChatRenderer) -> None:
        self._chat = chat
        self.passed: defaultdict[str, list[tuple[list[int], list[int]]]] = defaultdict(list)

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        turn = len(self.passed[session])
        spoken = [*self._chat.encode(SAYS.format(turn=turn)), self._chat.end_of_turn]
        self.passed[session].append((request.token_ids, spoken))
        runs = [VersionRun(Version(), 0, len(spoken))]
        return GenerateResult(token_ids=spoken, logprobs=[-0.5] * len(spoken), versions=runs, finish_reason="stop")


async def play(address: str, folder: Path, past: PastReasoning, engine: Engine, chat: ChatRenderer) -> None:
    """Let a worker play until the run is over, which it is once everything was trained."""
    (folder / "loop.py").write_text(LOOP)
    rollout = {"group_size": SAMPLES, "max_model_len": 2000, "max_tokens": 500}
    config = run_config(rollout, loop=f"{folder}/loop.py:asks_again", past_reasoning=past, max_tokens=2000)
    async with RewardService(RewardConfig()) as rewards, QueueClient(address, role="agent", name="w") as queue:
        await AgentWorker(queue, EpisodeRunner(config, chat, engine), rewards, config).run()


def take(address: str) -> list[Trajectory]:
    """Reserve the batch of step 0, fetch its rows, and end the run."""
    with SyncQueueClient(address, role="trainer", name="t", timeout_s=60) as queue:
        batch = queue.reserve(0, 50.0)
        assert isinstance(batch, Reserved)
        rows = queue.fetch([header.key for header in batch.headers])
        queue.finish()
        return rows


@pytest.mark.parametrize(("past", "rows_each"), [("keep", 1), ("strip", 3), ("split", 3)])
async def test_all_rows_of_a_sample_are_admitted(tmp_path: Path, past: PastReasoning, rows_each: int) -> None:
    chat = ChatRenderer(byte_tokenizer(TEMPLATE, eos="<|im_end|>"))
    engine = Engine(chat)
    prompt = [{"role": "user", "content": "count"}]
    tasks = [Task(task_id=f"t{n}", data_source="d", prompt=prompt, ground_truth="2") for n in range(GROUPS)]
    with serve(tasks, group_size=SAMPLES, batch_groups=GROUPS, max_staleness=0) as address:
        playing = asyncio.create_task(play(address, tmp_path, past, engine, chat))
        rows = await asyncio.to_thread(take, address)
        await playing
    assert sorted(row.key for row in rows) == [
        (group, sample, segment) for group in range(GROUPS) for sample in range(SAMPLES) for segment in range(rows_each)
    ]
    assert {row.reward for row in rows} == {1.0}, "the last answer is right, and all rows share its reward"
    for session, turns in engine.passed.items():
        own = sorted((row for row in rows if row.episode_id == session), key=lambda row: row.segment)
        trained = [tokens for row in own for tokens in row.token_ids[row.loss_mask].tolist()]
        assert trained == [token for _, spoken in turns for token in spoken], "each sampled token once, in order"
        lasts = turns[-1:] if past == "keep" else turns
        assert [row.token_ids.tolist() for row in own] == [sent + spoken for sent, spoken in lasts]
