"""Buckets from GPU to GPU, never on the host, between two processes, and a broadcast that ends after its deadline.

The former needs two GPUs, since NCCL refuses two processes on one.
"""

import dataclasses
import subprocess
import sys

import msgspec
import pytest
import torch

from rl_async.weight_sync.transports.process_groups import NcclSender
from tests.support.weights import make_buckets

pytestmark = pytest.mark.gpu

ENGINE = """
import sys
import msgspec, torch
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from rl_async.weight_sync.receiver import WeightReceiver

torch.cuda.set_device(1)
def load(pieces):
    assert all(piece.data.device == torch.device("cuda:1") for piece in pieces)
    print(sum(float(piece.data.double().sum()) for piece in pieces), flush=True)

receiver = WeightReceiver(load, "cuda:1")
receiver.init(msgspec.json.decode(sys.stdin.readline(), type=InitInfo))
for line in sys.stdin:
    receiver.update(msgspec.json.decode(line, type=UpdateInfo))
"""


# The only member of its group: its broadcast waits for a kernel that takes some ten times the deadline.
LATE = """
import dataclasses
import time
import torch
from rl_async.errors import WeightSyncError
from rl_async.weight_sync.transports.process_groups import NcclSender
from tests.support.weights import make_buckets

torch.cuda.set_device(0)
[bucket] = make_buckets([("w", torch.ones(1000))], 1 << 20)
bucket = dataclasses.replace(bucket, data=bucket.data.cuda())
sender = NcclSender((), "weights-0", 1.0)
sender.connect()
sender.send(bucket)
torch.cuda._sleep(20_000_000_000)
try:
    sender.send(bucket)
except WeightSyncError:
    print("late", flush=True)
sender.close()
time.sleep(4)
print("alive", flush=True)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_a_broadcast_after_its_deadline_is_an_error_and_the_process_lives() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["late", "alive"]), done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs")
def test_buckets_cross_from_one_gpu_to_another() -> None:
    torch.cuda.set_device(0)
    sender = NcclSender((1,), "weights-0", 60)
    process = subprocess.Popen([sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(sender.init_info(0)).decode() + "\n")
        process.stdin.flush()
        sender.connect()
        for bucket in make_buckets([("w", torch.arange(1000.0)), ("v", torch.ones(500, dtype=torch.bfloat16))], 2000):
            bucket = dataclasses.replace(bucket, data=bucket.data.cuda())
            process.stdin.write(msgspec.json.encode(sender.stage(bucket)).decode() + "\n")
            process.stdin.flush()
            sender.send(bucket)
        process.stdin.close()
        assert sum(map(float, process.stdout.read().split())) == 999 * 500 + 500
        assert process.wait(60) == 0
    finally:
        sender.close()
        process.kill()
        process.wait(10)
