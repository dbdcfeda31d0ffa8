"""`rl-async queue ...` against a queue that serves: what a person sees, moves, and is told when it cannot be done."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_async.configs.load import dump
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.launcher.cli.__main__ import main
from rl_async.messages import Inspection, Task, ToolCall, Turn, Version
from rl_async.process.http_auth import bearer, run_token
from rl_async.process.run_files import Endpoints, write_endpoints
from rl_async.transfer_queue import SyncQueueClient, serve
from rl_async.transfer_queue.auth import AllowList, read_client_keys
from tests.contracts.queue.peers import trajectory
from tests.support.ports import free_port


def tasks(count: int) -> list[Task]:
    return [Task(task_id=f"t{n}", data_source="d", prompt=[], ground_truth="7", extra={"n": n}) for n in range(count)]


@pytest.fixture
def address() -> Iterator[str]:
    with serve(tasks(9), group_size=2, batch_groups=2, max_staleness=2) as at:
        yield at


@pytest.fixture
def queue(address: str) -> Iterator[SyncQueueClient]:
    with SyncQueueClient(address, role="agent", name="worker", timeout_s=10) as client:
        yield client


def fill(queue: SyncQueueClient, groups: int) -> None:
    """Whole groups whose rows differ from each other."""
    for group in queue.lease(groups, 5.0).groups:
        for sample in group.samples:
            row = trajectory(group, sample, tokens=3 + group.group_id)
            call = ToolCall(name="add", arguments="{}", result="12")
            turns = [Turn(role="assistant", text=f"say {sample}", tool_calls=[call])]
            experts = np.full((len(row.token_ids) - 1, 2, 2), group.group_id, np.uint8)
            told = {"turns": turns, "reward_parts": {"right": 0.5}, "reward": 0.25, "routed_experts": experts}
            told["reward_reasons"] = {"right": "half of it"}
            queue.put(msgspec.structs.replace(row, **told))


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(["queue", *argv]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_status_shows_states_the_oldest_lease_and_dead_letters(address, queue, capsys, tmp_path):
    fill(queue, 2)
    (group,) = queue.lease(1, 5.0).groups
    for _ in range(3):
        queue.fail(group.group_id, 0, group.attempt, "boom")
        (group,) = queue.lease(1, 5.0).groups
    text = said(capsys, "status", address)
    assert "version 0.0 published, 3 of 6 slots used, 4 groups admitted, 1 workers" in text
    assert "dead letter: group 2, task t2: sample 0 failed 3 times; last: boom" in text
    assert f"oldest lease: group 3, with {queue.worker} for" in text
    write_endpoints(tmp_path, Endpoints(queue=address))
    report = msgspec.json.decode(said(capsys, "status", str(tmp_path), "--json"), type=Inspection)
    assert (report.status.ready, report.status.leased) == (2, 1)
    assert report.rates["rows"] > 0 and set(report.ages_s) == {"leased", "ready"}


def test_listing_and_peeking_take_nothing_away(address, queue, capsys):
    fill(queue, 2)
    queue.lease(1, 5.0)
    before = queue.status()
    lines = said(capsys, "ls", address).splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["0", "ready", "2/2"],
        ["1", "ready", "2/2"],
        ["2", "leased", "0/2"],
    ]
    (leased,) = said(capsys, "ls", address, "--state", "leased", "--json").splitlines()
    assert json.loads(leased)["workers"] == [queue.worker]
    text = said(capsys, "peek", address, "1", "1")
    assert "group 1, sample 1, segment 0" in text and "say 1" in text and "add({}) -> 12" in text
    assert "reward 0.25 (right 0.5), 4 tokens, 4 sampled" in text
    assert "right: reward 0.5 (half of it)" in text
    assert "0.0 for tokens 0 to 4" in text
    said(capsys, "peek", address, "2")
    assert "sample 5 of group 1" in said(capsys, "peek", address, "1", "5", code=2)
    assert "99" in said(capsys, "peek", address, "99", code=2)
    after = queue.status()
    assert after == msgspec.structs.replace(before, oldest_lease_s=after.oldest_lease_s)


def test_a_queue_that_is_not_there_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rl_async.launcher.cli.live_actions.ANSWER_S", 0.2)
    assert str(tmp_path) in said(capsys, "status", str(tmp_path), code=2)
    write_endpoints(tmp_path, Endpoints(queue="tcp://127.0.0.1:9"))
    assert "tcp://127.0.0.1:9" in said(capsys, "ls", str(tmp_path), code=2)
    for address in ("tcp://127.0.0.1", "tcp://127.0.0.1:abc", "http://127.0.0.1:80"):
        assert address in said(capsys, "status", address, code=2)


def test_the_queue_of_a_run_is_operated_with_the_key_in_its_folder(closed_run, capsys):
    run, queue = closed_run
    write_endpoints(run, Endpoints(queue=queue.address))
    config = RunConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"))
    (run / "config.yaml").write_text(dump(config))
    said(capsys, "drain", str(run), "--undo")
    assert queue.address in said(capsys, "status", queue.address, code=2)


def test_keygen_makes_a_client_with_a_role(tmp_path, capsys):
    assert "bob.key" in said(capsys, "keygen", str(tmp_path), "--client", "bob", "--role", "reader")
    allowed = AllowList(tmp_path / "clients")
    assert allowed.roles[read_client_keys(tmp_path, "bob").public] == "reader"


def test_a_folder_in_which_no_queue_can_be_served_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in said(capsys, "serve", str(tmp_path / "file"), code=2)
    (tmp_path / "config.yaml").write_text("")
    assert str(tmp_path) in said(capsys, "serve", str(tmp_path), code=2)
    assert "--port: 99999" in said(capsys, "serve", "--port", "99999", code=2)


def test_requeue_and_drain_say_what_follows(address, queue, capsys):
    (group,) = queue.lease(1, 5.0).groups
    for _ in range(3):
        queue.fail(group.group_id, 0, group.attempt, "boom")
        (group,) = queue.lease(1, 5.0).groups
    assert "group 1" in said(capsys, "requeue", address, "1", code=2)
    said(capsys, "requeue", address, "0")
    assert {"0", "1"} <= set(said(capsys, "drain", address).split()), "the numbers of waiting and of leased groups"
    assert queue.lease(1, 0.0).groups == []
    said(capsys, "drain", address, "--undo")
    assert queue.lease(1, 5.0).groups[0].task.task_id == "t0"


def test_what_is_exported_is_what_another_queue_gets(address, queue, capsys, tmp_path):
    fill(queue, 3)
    (part,) = queue.lease(1, 5.0).groups
    queue.put(trajectory(part, 0))
    file = tmp_path / "rows.parquet"
    assert "wrote 7 rows of 4 groups" in said(capsys, "export", address, str(file))
    table = pq.read_table(file)
    assert table.column("task_id").to_pylist() == ["t0", "t0", "t1", "t1", "t2", "t2", "t3"]
    assert table.column("newest_version").to_pylist() == ["0.0"] * 7
    assert queue.status().ready == 3, "they are still here"

    whole = tmp_path / "whole.parquet"
    pq.write_table(table.slice(0, 6), whole)
    with serve(group_size=2, batch_groups=3) as other, SyncQueueClient(other, role="trainer", name="t") as reader:
        assert "took 3 groups with 6 rows" in said(capsys, "import", other, str(whole))
        batch = reader.reserve(0, 5.0)
        rows = reader.fetch([header.key for header in batch.headers])
        originals = queue.fetch([(group, sample, 0) for group in range(3) for sample in range(2)])
        assert [batch.tasks[group] for group in range(3)] == tasks(3)
        for row, original in zip(rows, originals, strict=True):
            for name in ("token_ids", "loss_mask", "logprobs", "routed_experts"):
                found, wanted = getattr(row, name), getattr(original, name)
                assert found.dtype == wanted.dtype and np.array_equal(found, wanted)
            assert row.reward == 0.25 and row.turns == original.turns and row.versions == original.versions
        assert "took 3 tasks" in said(capsys, "import", other, str(whole), "--as", "tasks")
        assert reader.inspect().submitted == 3
        text = said(capsys, "import", address, str(file), "--timeout", "0.1", code=2)
        assert "group 2" in text, "two slots were left"


def test_incomplete_groups_are_imported_as_tasks_only(address, queue, capsys, tmp_path):
    fill(queue, 1)
    (part,) = queue.lease(1, 5.0).groups
    queue.put(trajectory(part, 0))
    file = tmp_path / "rows.parquet"
    said(capsys, "export", address, str(file))
    with serve(group_size=2, batch_groups=3) as other:
        assert "1 groups with 2 rows; 1 groups that are incomplete" in said(capsys, "import", other, str(file))
        assert "took 2 tasks" in said(capsys, "import", other, str(file), "--as", "tasks")


def test_an_import_says_what_does_not_fit(address, queue, capsys, tmp_path):
    fill(queue, 2)
    file = tmp_path / "rows.parquet"
    said(capsys, "export", address, str(file))
    with serve(group_size=3) as other:
        error = said(capsys, "import", other, str(file), code=2)
        assert "[0, 1]" in error and "3" in error
    with serve(group_size=2, batch_groups=1, max_staleness=0) as other:
        text = said(capsys, "import", other, str(file), "--timeout", "0.1", code=2)
        assert "group 1" in text
    for verb, name in (("export", "no/x.parquet"), ("import", "no.parquet")):
        assert str(tmp_path / name) in said(capsys, verb, address, str(tmp_path / name), code=2)
    pq.write_table(pa.table({"group_id": [1]}), tmp_path / "other.parquet")
    error = said(capsys, "import", address, str(tmp_path / "other.parquet"), code=2)
    assert "state" in error and "sample" in error


def test_rows_older_than_what_is_published_are_not_imported(address, queue, capsys, tmp_path):
    fill(queue, 2)
    file = tmp_path / "rows.parquet"
    said(capsys, "export", address, str(file))
    with serve(group_size=2, batch_groups=2) as other, SyncQueueClient(other, role="trainer", name="t") as reader:
        said(capsys, "import", other, str(file))
        reader.reserve(0, 5.0)
        reader.commit(0)
        reader.publish(Version(0, 1), [])
        text = said(capsys, "import", other, str(file), code=2)
        assert "version 0" in text
        assert reader.status().admitted == 2


def test_a_served_queue_keeps_its_folder(tmp_path, capsys):
    file = tmp_path / "tasks.jsonl"
    file.write_text(
        '{"prompt": [{"role": "user", "content": "1+1"}], "data_source": "d", "reward_model": {"ground_truth": "2"}}\n'
    )
    folder = tmp_path / "queue"
    command = [sys.executable, "-m", "rl_async.launcher.cli", "queue", "serve", str(folder), "--tasks", str(file)]
    port = free_port()
    command += ["--metrics-port", str(port)]
    for number in range(2):
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("listening on tcp://127.0.0.1:")
            assert f"{number} groups admitted" in said(capsys, "status", str(folder))
            headers = bearer(run_token(folder, "metrics"))
            scrape = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
            with urllib.request.urlopen(scrape, timeout=20) as answer:
                assert f"rl_async_queue_admitted_total {number}.0\n".encode() in answer.read()
            at = msgspec.json.decode((folder / "endpoints.json").read_bytes(), type=Endpoints).queue
            with SyncQueueClient(at, role="agent", name="w", timeout_s=10) as worker:
                groups = worker.lease(1, 0.0).groups
            assert [group.task.task_id for group in groups] == ["tasks:0"][number:]
        finally:
            os.kill(server.pid, signal.SIGTERM)
            server.communicate(timeout=30)
        assert server.returncode == 0
