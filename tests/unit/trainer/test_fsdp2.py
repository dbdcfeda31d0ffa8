"""The FSDP2 backend on real gloo ranks: what is learned does not depend on ranks or micro-batches."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def train(model: Path, out: Path, ranks: int, tokens: int, correction: str, sizes: str = "{}") -> str:
    """Run ``update_worker`` on ``ranks`` processes; returns the metrics, which all of them must agree on."""
    port, arguments = free_port(), [str(model), str(out), str(tokens), correction, sizes]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.trainer.update_worker", *arguments],
            env=os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [worker.communicate(timeout=120) for worker in workers]
    for worker, (_, errors) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, errors[-3000:]
    assert len({told for told, _ in outputs}) == 1, "ranks disagree about the metrics"
    return outputs[0][0]


@pytest.mark.parametrize("correction", ["decoupled_seq_is", "bypass_ppo_clip", "bypass_pg_is"])
def test_ranks_and_micro_batches_do_not_change_what_is_learned(
    model_folder: Path, tmp_path: Path, correction: str
) -> None:
    metrics = {}
    for name, ranks, tokens in (("one", 1, 10_000), ("small", 1, 40), ("two", 2, 60)):
        metrics[name] = train(model_folder, tmp_path / f"{name}.safetensors", ranks, tokens, correction)
    if correction.startswith("decoupled"):
        assert all("'correction/weight_mean': 1.0," in told for told in metrics.values()), "not normalised"
    whole = load_file(tmp_path / "one.safetensors")
    before = load_file(model_folder / "model.safetensors")
    assert any((whole[k] - before[k]).abs().max() > 1e-4 for k in whole)
    for other in ("small", "two"):
        weights = load_file(tmp_path / f"{other}.safetensors")
        assert weights.keys() == whole.keys()
        # Adam divides by the root of the squared gradient, which magnifies the last bits of tiny gradients
        assert max((weights[k] - whole[k]).abs().max().item() for k in whole) < 2e-5, metrics
