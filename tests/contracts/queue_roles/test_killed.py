"""The queue is killed in the middle of traffic, again and again: nothing acknowledged is lost, nothing comes twice."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from rl_async.configs.load import dump
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.rollout import RolloutConfig
from rl_async.configs.schema.run import QueueConfig, RedisConfig, RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.messages import Commit, Done, LeasedGroup, Publish, Reserved, StatusReport, Trajectory, Version
from rl_async.process.http_auth import Role
from rl_async.process.private_folder import make_private
from rl_async.transfer_queue.client import QueueClient
from rl_async.transfer_queue.ledger import audit
from tests.contracts.queue.peers import trajectory
from tests.contracts.queue_storage.journals import redis_server
from tests.support.queue import async_client, lost, make_run_keys

KILLS, STEPS, BATCH, GROUP = 4, 40, 2, 4
CONFIG = RunConfig(
    model=ModelConfig(path="no-model-needed"),
    data=DataConfig(path="tasks.jsonl", train_batch_groups=BATCH),
    rollout=RolloutConfig(group_size=GROUP),
    trainer=TrainerConfig(steps=STEPS),
    name="killed",
)


@pytest.fixture(params=["sqlite", "redis"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The folder of a run with this journal."""
    row = {"data_source": "unit", "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "1"}}
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row | {"extra_info": {}}) + "\n" for _ in range(8)))

    def write(queue: QueueConfig) -> Path:
        (tmp_path / "config.yaml").write_text(dump(msgspec.structs.replace(CONFIG, queue=queue)))
        make_run_keys(tmp_path)
        return tmp_path

    if request.param == "sqlite":
        yield write(QueueConfig(journal="sqlite"))
        return
    with redis_server(tmp_path) as (port, _):
        yield write(QueueConfig(journal="redis", redis=RedisConfig(url=f"redis://127.0.0.1:{port}/0")))


class Victim:
    """The queue's process at one address."""

    def __init__(self, run: Path) -> None:
        self.address = f"ipc://{run}/sockets/queue"
        make_private(run / "sockets")
        command = [sys.executable, "-m", "rl_async.transfer_queue", "--run", str(run), "--address", self.address]
        self._command, self._run = command, run
        self.start()

    def start(self) -> None:
        with (self._run / "queue.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=self._run, stderr=log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Traffic:
    """Two workers and a trainer, and what the queue acknowledged to them."""

    def __init__(self, run: Path, address: str) -> None:
        self._run, self._address = run, address
        self.acknowledged: dict[tuple[int, int], str] = {}  # hash of the tokens by (group, sample)
        self.trained: dict[tuple[int, int], str] = {}
        self.logged: dict[int, dict[tuple[int, int], str]] = {}  # by position, as a logger has them on its disk
        self.step = 0
        self.subscribed = asyncio.Event()  # before anything is trained that a late logger would not get

    def client(self, role: Role) -> QueueClient:
        return async_client(self._run, self._address, role, patience_s=0.3)

    async def work(self) -> None:
        async with self.client("worker") as client:
            while not (leased := await client.lease(2, 0.5)).finished:
                await asyncio.gather(*(self.put(client, g, sample) for g in leased.groups for sample in g.samples))

    async def put(self, client: QueueClient, group: LeasedGroup, sample: int) -> None:
        tokens = np.random.default_rng().integers(0, 1 << 20, 2000, dtype=np.int32)
        row = msgspec.structs.replace(trajectory(group, sample, 2000), token_ids=tokens)
        if isinstance(await client.put(row), Done):
            assert self.acknowledged.setdefault((group.group_id, sample), row.tokens_hash()) == row.tokens_hash()

    async def log(self) -> None:
        """A logger that is started again and again, in the middle of what it does, and has what it stored."""
        while len(self.logged) < STEPS * BATCH:
            async with self.client("reader") as client:
                await client.subscribe("logger", oldest=True)
                self.subscribed.set()
                for _ in range(random.randint(1, 20)):
                    position = max(self.logged, default=-1)
                    reply = await client.read("logger", 0.2, after=position, max_groups=4)
                    for group in reply.groups:
                        rows = await client.fetch([header.key for header in group.headers])
                        assert group.position == max(self.logged, default=0) + 1, "in order, and none left out"
                        self.logged[group.position] = {(row.group_id, row.sample): row.tokens_hash() for row in rows}
                    if reply.groups and random.random() < 0.7:
                        await client.acknowledge("logger", reply.groups[-1].position)
                    if len(self.logged) == STEPS * BATCH:
                        return

    async def train(self) -> None:
        async with self.client("trainer") as client:
            await client.publish(Version(0, 0), [])
            await self.subscribed.wait()
            while self.step < STEPS:
                batch = await client.reserve(self.step, 1.0)
                if not isinstance(batch, Reserved):
                    continue
                rows = await client.fetch([header.key for header in batch.headers])
                self.record(batch, rows)
                for request in (Commit(step=self.step), Publish(version=Version(0, self.step + 1), engines=[])):
                    assert (await client.exchange(request)).reply == Done()
                self.step += 1
                if self.step % 5 == 0:
                    assert await client.retire(self.step) == Done()
            while len(self.logged) < STEPS * BATCH:  # noqa: ASYNC110 - the logger has no event, and a deadline of its own
                await asyncio.sleep(0.05)
            async with self.client("reader") as logger:
                await logger.unsubscribe("logger")
            assert await client.finish() == Done()
            status = await client.status()
            assert isinstance(status, StatusReport) and (status.slots_used, status.payload_bytes) == (0, 0)

    def record(self, batch: Reserved, rows: list[Trajectory]) -> None:
        lines = []
        for header, row in zip(batch.headers, rows, strict=True):
            digest = xxh3_128_hexdigest(row.token_ids.tobytes())
            key = (header.group_id, header.sample)
            assert header.key == row.key and header.tokens_hash == digest, "payload and header belong together"
            assert key not in self.trained, f"{key} came twice"
            self.trained[key] = digest
            lines.append({"lineage": 0, "step": self.step, "group": key[0], "sample": key[1], "tokens_hash": digest})
        with (self._run / "trained.jsonl").open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))


async def kill_now_and_then(victim: Victim, traffic: Traffic) -> None:
    """One kill in each part of the run."""
    for number in range(KILLS):
        goal = (number + 1) * STEPS // (KILLS + 1)
        while traffic.step < goal:  # noqa: ASYNC110 - processes set no event
            await asyncio.sleep(0.005)
        await asyncio.sleep(random.random() * 0.05)
        victim.kill()
        victim.start()


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_nothing_acknowledged_is_lost(run: Path) -> None:
    victim = Victim(run)
    traffic = Traffic(run, victim.address)
    try:
        async with asyncio.timeout(150), asyncio.TaskGroup() as tasks:
            for work in (
                traffic.train(),
                traffic.work(),
                traffic.work(),
                traffic.log(),
                kill_now_and_then(victim, traffic),
            ):
                tasks.create_task(work)
    finally:
        victim.kill()
    assert "Traceback" not in (run / "queue.log").read_text()
    assert len(traffic.trained) == STEPS * BATCH * GROUP
    assert lost(traffic.acknowledged.items(), traffic.trained) == []
    logged = [item for rows in traffic.logged.values() for item in rows.items()]
    assert len(logged) == len(traffic.trained) and dict(logged) == traffic.trained, "a logger has each row once"
    report = audit(run)
    assert report.ok and report.in_flight is None, report.text()
