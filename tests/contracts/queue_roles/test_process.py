"""The queue as its own process: the composition root, its ledger, its end, its one-line errors and its metrics."""

import asyncio
import contextlib
import json
import random
import shutil
import signal
import socket
import socket as sockets
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from rl_async.configs.load import dump
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.rollout import RolloutConfig
from rl_async.configs.schema.run import EvalConfig, QueueConfig, RedisConfig, RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import QueueLost, UserError
from rl_async.messages import (
    Commit,
    Done,
    Leased,
    LeasedGroup,
    NotReady,
    Publish,
    Refused,
    Reserved,
    StatusReport,
    Task,
    Trajectory,
    Version,
)
from rl_async.process.http_auth import ROLES, Role, bearer, make_tokens, run_token
from rl_async.process.private_folder import make_private
from rl_async.transfer_queue import QueueDataset, read_batches, serve
from rl_async.transfer_queue.client import QueueClient, SyncQueueClient
from rl_async.transfer_queue.delivery import numbered
from rl_async.transfer_queue.ledger import audit
from rl_async.transfer_queue.telemetry import serve_metrics
from tests.contracts.queue.peers import trajectory
from tests.contracts.queue_storage.journals import redis_server
from tests.support.ports import free_port
from tests.support.queue import async_client, lost, make_run_keys, sync_client

CONFIG = RunConfig(
    model=ModelConfig(path="no-model-needed"),
    data=DataConfig(path="tasks.jsonl", eval_path="tasks.jsonl", train_batch_groups=2),
    eval=EvalConfig(tasks=3),
    queue=QueueConfig(journal="memory"),
    name="unit",
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [
        {
            "data_source": "unit",
            "prompt": [{"role": "user", "content": f"What is {number}?"}],
            "ability": "",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {},
        }
        for number in range(8)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text(dump(CONFIG))
    make_run_keys(tmp_path)
    return tmp_path


@pytest.fixture
def port() -> Iterator[int]:
    number = free_port()
    yield number


def start(run: Path, port: int, host: str = "127.0.0.1") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rl_async.transfer_queue", "--run", str(run)]
    return subprocess.Popen([*command, "--address", f"tcp://{host}:{port}"], cwd=run, stderr=subprocess.PIPE, text=True)


def test_the_process_answers_scrapes_where_its_file_says(run, port):
    tracking = msgspec.structs.replace(CONFIG.tracking, prometheus=True)
    (run / "config.yaml").write_text(dump(msgspec.structs.replace(CONFIG, tracking=tracking)))
    make_tokens(run / "keys")
    process = start(run, port)
    try:
        with sync_client(run, f"tcp://127.0.0.1:{port}", "trainer") as client:
            client.publish(Version(0, 0), [])
        (target,) = json.loads((run / "prometheus" / "queue.json").read_text())
        scrape = urllib.request.Request(
            f"http://{target['targets'][0]}/metrics", headers=bearer(run_token(run, "metrics"))
        )
        with urllib.request.urlopen(scrape, timeout=20) as answer:
            assert b"rl_async_queue_published_step 0.0\n" in answer.read()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors


async def test_the_process_serves_and_ends_on_sigterm(run, port):
    process = start(run, port)
    try:
        address = f"tcp://127.0.0.1:{port}"
        async with async_client(run, address, "trainer") as trainer, async_client(run, address, "worker") as worker:
            await trainer.publish(Version(0, 0), [])
            await trainer.evaluate(0)
            groups = (await worker.lease(5, 5.0)).groups
            assert [group.partition for group in groups] == ["eval"] * 3 + ["train"] * 2
            assert groups[3].samples == list(range(16))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    journal, *ledger = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert journal["event"] == "journal" and journal["id"].startswith("unit-")
    assert [(line["event"], line["partition"]) for line in ledger] == [("admit", "eval")] * 3 + [("admit", "train")] * 2


def test_killed_queue_is_restored_from_a_snapshot(run, port):
    address = f"tcp://127.0.0.1:{port}"
    first = start(run, port)
    try:
        with sync_client(run, address, "trainer") as trainer:
            trainer.publish(Version(0, 0), [])
            snapshot = trainer.snapshot()
    finally:
        first.kill()
        first.communicate()
    second = start(run, port)
    try:
        with sync_client(run, address, "trainer") as trainer:
            trainer.lineage = 1
            assert trainer.resume(0, 1, snapshot).readmitted == 0
            trainer.publish(Version(1, 0), [])
            assert isinstance(trainer.reserve(0, 0.0), NotReady)
    finally:
        second.kill()
        second.communicate()


@pytest.mark.parametrize("host", [pytest.param("127.0.0.1", marks=pytest.mark.slow), "0.0.0.0"])
def test_a_queue_wants_keys_and_then_serves_who_has_them(run, port, host):
    keys = run / "keys"
    (run / "config.yaml").write_text(dump(msgspec.structs.replace(CONFIG, queue=QueueConfig(journal="memory"))))
    shutil.rmtree(keys)
    ends_with(run, port, f"{keys / 'server.key'} is missing", host=host)
    make_run_keys(run)
    process = start(run, port, host=host)
    try:
        with sync_client(run, f"tcp://127.0.0.1:{port}", "trainer") as client:
            client.publish(Version(0, 0), [])
        with (
            SyncQueueClient(f"tcp://127.0.0.1:{port}", role="test", name="stranger", timeout_s=1) as stranger,
            pytest.raises(QueueLost, match="closed"),
        ):
            stranger.status()
    finally:
        process.kill()
        _, errors = process.communicate()
    secrets = [path.read_text().strip() for path in keys.glob("*.key")]
    assert len(secrets) == 1 + len(ROLES) and not [secret for secret in secrets if secret in errors]


def test_a_stranger_on_loopback_registers_no_engine(run, port):
    process = start(run, port)
    try:
        with (
            SyncQueueClient(f"tcp://127.0.0.1:{port}", role="launcher", name="stranger", timeout_s=5) as stranger,
            pytest.raises(QueueLost),
        ):
            stranger.register_engine("mine", "http://127.0.0.1:9", "embedded")
    finally:
        process.kill()
        process.communicate()


def ends_with(run: Path, port: int, message: str, host: str = "127.0.0.1") -> None:
    process = start(run, port, host)
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 2, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert message in line and "Traceback" not in errors


def test_a_taken_port_is_one_clear_line(run):
    with sockets.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ends_with(run, taken.getsockname()[1], "cannot listen on tcp://127.0.0.1:")


def test_a_missing_config_is_one_clear_line(tmp_path, port):
    ends_with(tmp_path, port, "config.yaml")


TOKEN = "m" * 43


@pytest.fixture
def metrics_port() -> int:
    return free_port()


def scrape(metrics_port: int, path: str = "/metrics") -> dict[str, float]:
    """The samples by name and label; comments are checked to come in pairs before them."""
    request = urllib.request.Request(f"http://127.0.0.1:{metrics_port}{path}", headers=bearer(TOKEN))
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    helped = [line.split()[2] for line in lines if line.startswith("# HELP")]
    assert helped == [line.split()[2] for line in lines if line.startswith("# TYPE")]
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert {name.split("{")[0] for name in found} <= set(helped)
    return {name.removeprefix("rl_async_queue_"): float(value) for name, value in found.items()}


def test_a_scrape_shows_the_queue_as_it_is(metrics_port):
    tasks = list(map(numbered, range(9)))
    with (
        serve(tasks, batch_groups=2) as address,
        serve_metrics(metrics_port, address, TOKEN),
        SyncQueueClient(address, role="agent", name="w", timeout_s=10) as queue,
    ):
        first, second = queue.lease(2, 5.0).groups
        queue.put(trajectory(first, 0))
        queue.fail(second.group_id, 0, second.attempt, "boom")
        found = scrape(metrics_port)
        assert found['groups{state="ready"}'] == found['groups{state="waiting"}'] == 1
        assert found['groups{state="leased"}'] == 0
        assert found['events_total{kind="redelivered"}'] == 1
        assert (found["slots"], found["slots_used"], found["admitted_total"], found["workers"]) == (4, 2, 2, 1)
        assert found["payload_bytes"] == queue.status().payload_bytes > 0
        assert found['rate_per_second{of="rows"}'] > 0
        assert 'oldest_seconds{state="ready"}' in found and 'oldest_seconds{state="leased"}' not in found
        assert (found["draining"], found["published_step"]) == (0, 0)
        queue.drain()
        assert scrape(metrics_port)["draining"] == 1
        with pytest.raises(urllib.error.HTTPError, match="404") as missing:
            scrape(metrics_port, "/else")
        missing.value.close()


def test_without_a_queue_a_scrape_fails_and_does_not_show_zeros(metrics_port, address):
    with (
        serve_metrics(metrics_port, address, TOKEN, answer_s=0.2),
        pytest.raises(urllib.error.HTTPError, match="503") as failed,
    ):
        scrape(metrics_port)
    failed.value.close()


def test_strangers_who_begin_a_request_and_fall_silent_hold_no_scrape_up(metrics_port):
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serve(list(map(numbered, range(9)))))
        stack.enter_context(serve_metrics(metrics_port, address, TOKEN))
        for _ in range(30):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", metrics_port), timeout=20))
            silent.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        assert scrape(metrics_port)["published_step"] == 0


def test_a_taken_port_is_named(metrics_port, address):
    with (
        serve_metrics(metrics_port, address, TOKEN),
        pytest.raises(UserError, match=r"--metrics-port"),
        serve_metrics(metrics_port, address, TOKEN),
    ):
        raise AssertionError("it served")


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), (bearer("0" * 43), 401), (bearer(TOKEN) | {"Origin": "null"}, 403), ({"Host": "a.example"}, 403)],
)
def test_a_scrape_without_the_token_or_of_a_web_page_is_refused(metrics_port, address, headers, status):
    request = urllib.request.Request(f"http://127.0.0.1:{metrics_port}/metrics", headers=headers)
    with serve_metrics(metrics_port, address, TOKEN), pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20)
    refused.value.close()
    assert refused.value.code == status


# A queue without a run: in process, durable or not, read in batches, by torch, and by the example.


ROOT = Path(__file__).parents[3]


def tasks(count: int, first: int = 0) -> list[Task]:
    return list(map(numbered, range(first, first + count)))


def client(address: str, name: str = "me") -> SyncQueueClient:
    return SyncQueueClient(address, role="test", name=name, timeout_s=10)


def produce(queue: SyncQueueClient, leased: Leased) -> None:
    for group in leased.groups:
        for sample in group.samples:
            assert queue.put(trajectory(group, sample)) == Done()


def test_tasks_come_out_as_batches_and_slots_become_free():
    with serve(tasks(6), group_size=2, batch_groups=2, max_staleness=0) as address, client(address) as queue:
        seen = []
        produce(queue, queue.lease(10, 5.0))
        assert queue.lease(10, 0.0).groups == [], "the slots are taken until the batch is done"
        for batch in read_batches(queue, steps=3, timeout_s=10):
            seen.append([(row.group_id, row.sample) for row in batch.rows])
            assert [batch.tasks[group].task_id for group in sorted(batch.tasks)] == [f"t{g}" for g, _ in seen[-1][::2]]
            if batch.step < 2:
                with client(address, "other") as other:
                    other.commit(batch.step)
                    other.publish(type(other.status().published)(0, batch.step + 1), [])
                    produce(other, other.lease(10, 5.0))
        assert seen == [[(g, s) for g in (n, n + 1) for s in (0, 1)] for n in (0, 2, 4)]
        assert queue.status().payload_bytes == 0, "what is done is forgotten"


def test_reading_ends_when_the_queue_is_finished_with_what_was_ready():
    with serve(tasks(5), batch_groups=2, max_staleness=1) as address, client(address) as queue:
        produce(queue, queue.lease(10, 5.0))
        queue.finish()
        assert [batch.step for batch in read_batches(queue, timeout_s=10)] == [0, 1]


def test_a_reader_that_stops_in_the_middle_gets_the_batch_again():
    with serve(tasks(2), batch_groups=2) as address, client(address) as queue:
        produce(queue, queue.lease(10, 5.0))
        first = next(read_batches(queue, timeout_s=10))
        again = next(read_batches(queue, timeout_s=10))
        assert first.headers == again.headers and again.step == 0


def test_waiting_in_vain_says_what_was_missing():
    with (
        serve(tasks(1), batch_groups=2) as address,
        client(address) as queue,
        pytest.raises(QueueLost, match="step 0"),
    ):
        next(read_batches(queue, timeout_s=0.1))


def test_a_policy_is_one_argument_and_a_mistake_is_explained():
    important = [msgspec.structs.replace(task, priority=float(n)) for n, task in enumerate(tasks(4))]
    with serve(important, batch_groups=2, max_staleness=2, sampling="priority") as address, client(address) as queue:
        produce(queue, queue.lease(10, 5.0))
        first = next(read_batches(queue, timeout_s=10))
        assert [task.task_id for task in first.tasks.values()] == ["t2", "t3"]
    for changes, message in (
        ({"sampling": "freshst", "max_staleness": 2}, "known: fifo, freshest"),
        ({"sampling": "quota", "max_staleness": 2}, "known: fifo, freshest, priority"),
        ({"sampling": "priority"}, "nothing to choose from with max_staleness=1"),
        ({"window": 1, "batch_groups": 2}, "window=1: at least batch_groups=2"),
    ):
        with pytest.raises(UserError, match=message), serve(**changes):
            raise AssertionError("it served")


def test_producers_submit_tasks_or_bring_their_own():
    with serve(group_size=1, batch_groups=4) as address, client(address) as queue:
        assert queue.lease(1, 0.0).groups == []
        assert queue.submit(tasks(2)) == Done()
        assert [group.task.task_id for group in queue.lease(5, 5.0).groups] == ["t0", "t1"]
        (own,) = queue.lease(1, 5.0, tasks(1, first=9)[0]).groups
        assert own.task.task_id == "t9"
        assert queue.inspect().submitted == 0


def test_a_durable_queue_goes_on_where_it_was(tmp_path):
    with serve(tasks(3), folder=tmp_path, batch_groups=2) as address, client(address) as queue:
        produce(queue, queue.lease(2, 5.0))
        queue.submit(tasks(1, first=7))
    with serve(tasks(3), folder=tmp_path, batch_groups=2) as address, client(address) as queue:
        assert [batch.step for batch in read_batches(queue, steps=1, timeout_s=10)] == [0]
        assert [group.task.task_id for group in queue.lease(5, 5.0).groups] == ["t7", "t2"]
    with (
        pytest.raises(UserError, match=r"\b3\b.*\b4\b"),
        serve(tasks(4), folder=tmp_path, batch_groups=2),
    ):
        raise AssertionError("it served")


def test_what_is_wrong_with_a_queue_is_said_before_it_serves(address):
    with pytest.raises(UserError, match="group_size=0"), serve(group_size=0):
        raise AssertionError("it served")
    with serve(address=address), pytest.raises(UserError, match=address), serve(address=address):
        raise AssertionError("it served")


def test_a_dead_letter_gets_another_chance_over_the_wire():
    with serve(tasks(3), batch_groups=1, max_staleness=0) as address, client(address) as queue:
        assert isinstance(queue.requeue(0), Refused)
        for _ in range(3):
            (group,) = queue.lease(1, 5.0).groups
            queue.fail(group.group_id, 0, group.attempt, "boom")
        (letter,) = queue.inspect().dead_letters
        assert letter.group_id == 0 and "boom" in letter.error
        assert queue.requeue(0) == Done()
        (again,) = queue.lease(1, 5.0).groups
        assert (again.group_id, again.task.task_id) == (1, "t0")
        assert queue.inspect().dead_letters == []


def test_draining_stops_admission_and_not_what_was_begun():
    with serve(tasks(3), batch_groups=2) as address, client(address) as queue:
        leased = queue.lease(1, 5.0)
        queue.drain()
        assert queue.lease(1, 0.0).groups == []
        produce(queue, leased)
        report = queue.inspect()
        assert report.draining and report.status.ready == 1
        queue.drain(False)
        assert [group.group_id for group in queue.lease(1, 5.0).groups] == [1]


def test_torch_reads_batches():
    from torch.utils.data import DataLoader

    with serve(tasks(4), group_size=2, batch_groups=2) as address:
        with client(address) as queue:
            produce(queue, queue.lease(10, 5.0))
        dataset = QueueDataset(address, steps=2, timeout_s=10)
        batches = list(DataLoader(dataset, batch_size=None))
        assert [batch.step for batch in batches] == [0, 1]
        assert [row.key for row in batches[1].rows] == [(2, 0, 0), (2, 1, 0), (3, 0, 0), (3, 1, 0)]


def test_the_api_loads_neither_torch_nor_the_server():
    code = (
        "import sys; from rl_async.transfer_queue import QueueClient, SyncQueueClient, read_batches, serve; "
        "assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_example_runs():
    found = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "queue_alone.py")], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        "step 0: rewards [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]",
        "step 1: rewards [4.0, 4.0, 5.0, 5.0, 6.0, 6.0, 7.0, 7.0]",
    ]


# The queue is killed in the middle of traffic, again and again: nothing acknowledged is lost, nothing comes twice.


KILLS, STEPS, BATCH, GROUP = 4, 40, 2, 4
KILLED_CONFIG = RunConfig(
    model=ModelConfig(path="no-model-needed"),
    data=DataConfig(path="tasks.jsonl", train_batch_groups=BATCH),
    rollout=RolloutConfig(group_size=GROUP),
    trainer=TrainerConfig(steps=STEPS),
    name="killed",
)


@pytest.fixture(params=["sqlite", "redis"])
def killed_run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Make the folder of a run with this journal."""
    row = {"data_source": "unit", "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "1"}}
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row | {"extra_info": {}}) + "\n" for _ in range(8)))

    def write(queue: QueueConfig) -> Path:
        (tmp_path / "config.yaml").write_text(dump(msgspec.structs.replace(KILLED_CONFIG, queue=queue)))
        make_run_keys(tmp_path)
        return tmp_path

    if request.param == "sqlite":
        yield write(QueueConfig(journal="sqlite"))
        return
    with redis_server(tmp_path) as (port, _):
        yield write(QueueConfig(journal="redis", redis=RedisConfig(url=f"redis://127.0.0.1:{port}/0")))


class Victim:
    """The queue's process at one address."""

    def __init__(self, killed_run: Path) -> None:
        self.address = f"ipc://{killed_run}/sockets/queue"
        make_private(killed_run / "sockets")
        command = [sys.executable, "-m", "rl_async.transfer_queue", "--run", str(killed_run), "--address", self.address]
        self._command, self._run = command, killed_run
        self.start()

    def start(self) -> None:
        with (self._run / "queue.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=self._run, stderr=log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Traffic:
    """Two workers and a trainer, and what the queue acknowledged to them."""

    def __init__(self, killed_run: Path, address: str) -> None:
        self._run, self._address = killed_run, address
        # The hash of the tokens by group and sample.
        self.acknowledged: dict[tuple[int, int], str] = {}
        self.trained: dict[tuple[int, int], str] = {}
        # The same by position, as a logger has them on its disk.
        self.logged: dict[int, dict[tuple[int, int], str]] = {}
        self.step = 0
        # It is set before anything is trained that a late logger would not get.
        self.subscribed = asyncio.Event()

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
async def test_nothing_acknowledged_is_lost(killed_run: Path) -> None:
    victim = Victim(killed_run)
    traffic = Traffic(killed_run, victim.address)
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
    assert "Traceback" not in (killed_run / "queue.log").read_text()
    assert len(traffic.trained) == STEPS * BATCH * GROUP
    assert lost(traffic.acknowledged.items(), traffic.trained) == []
    logged = [item for rows in traffic.logged.values() for item in rows.items()]
    assert len(logged) == len(traffic.trained) and dict(logged) == traffic.trained, "a logger has each row once"
    report = audit(killed_run)
    assert report.ok and report.in_flight is None, report.text()
