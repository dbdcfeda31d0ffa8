"""The worker as a process, with a real queue and no engine: it starts, is leased nothing, and ends when told to."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.toy_tasks import make_data
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.rollout import AgentConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.process.http_auth import make_tokens
from rl_async.transfer_queue.auth.keys import provide_keys
from rl_async.transfer_queue.client import SyncQueueClient
from tests.support.queue import sync_client
from tests.unit.agent_loop.conftest import demos


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


@pytest.mark.parametrize("how", ["SIGTERM", "end of the run"])
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
