"""Buckets from GPU to GPU, never on the host, between two processes. Needs two GPUs, since NCCL refuses two on one."""

import dataclasses
import subprocess
import sys

import msgspec
import pytest
import torch

from rl_async.weight_sync.transports.process_groups import NcclSender
from tests.support.weights import make_buckets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs"),
]

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
