"""The worker with a real queue: it starts and ends as a process, and its episodes of several rows are taken whole."""

import asyncio
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.toy_tasks import make_data
from rl_async.agent_loop.worker import AgentWorker
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.reward import RewardConfig
from rl_async.configs.schema.rollout import AgentConfig, PastReasoning
from rl_async.configs.schema.run import RunConfig
from rl_async.messages import Reserved, Task, Trajectory, Version, VersionRun
from rl_async.process.http_auth import make_tokens
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.transfer_queue import QueueClient, serve
from rl_async.transfer_queue.auth import provide_keys
from rl_async.transfer_queue.client import SyncQueueClient
from tests.support.queue import sync_client
from tests.support.tiny_models import byte_tokenizer
from tests.unit.agent_loop.conftest import demos
from tests.unit.agent_loop.fakes import run_config
from tests.unit.agent_loop.test_episode import TEMPLATE


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"rl_async.{module}", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def write_run(folder: Path, tokenizer: PreTrainedTokenizerFast, **agent: Any) -> Path:
    make_data("sort", folder, train=5, held_out=2, demos=2)
    tokenizer.save_pretrained(folder / "model")
    config = RunConfig(
        model=ModelConfig(path=str(folder / "model"), dtype="float32"),
        data=DataConfig(path=str(folder / "train.parquet")),
        agent=AgentConfig(**agent),
    )
    (folder / "config.yaml").write_bytes(msgspec.yaml.encode(config))
    provide_keys(config, folder)
    make_tokens(folder / "keys")
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(demos("shop", 100), 200)


@pytest.fixture
def run(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, address: str) -> Iterator[Path]:
    folder = write_run(tmp_path, tokenizer)
    queue = start("transfer_queue", "--run", str(folder), "--address", address)
    yield folder
    queue.terminate()
    end(queue)


def wait_for_worker(client: SyncQueueClient) -> None:
    deadline = time.monotonic() + 60
    while not client.status().workers:
        assert time.monotonic() < deadline, "no worker came"
        time.sleep(0.02)


@pytest.mark.parametrize("how", [pytest.param("SIGTERM", marks=pytest.mark.slow), "end of the run"])
def test_a_worker_ends_cleanly(run: Path, address: str, how: str) -> None:
    worker = start("agent_loop", "--run", str(run), "--index", "0", "--queue", address)
    try:
        with sync_client(run, address, "trainer") as client:
            wait_for_worker(client)
            if how == "SIGTERM":
                worker.send_signal(signal.SIGTERM)
            else:
                client.finish()
            code, errors = end(worker)
    finally:
        worker.kill()
    assert code == (143 if how == "SIGTERM" else 0), errors
    assert "Traceback" not in errors


def test_a_wrong_config_is_one_line(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, address: str) -> None:
    folder = write_run(tmp_path, tokenizer, loop="chess")
    code, errors = end(start("agent_loop", "--run", str(folder), "--index", "0", "--queue", address))
    assert code == 2
    assert errors.splitlines()[-1].startswith("error: agent.loop: no loop 'chess'")
    assert "Traceback" not in errors


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
