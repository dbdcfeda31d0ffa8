"""An update copies each byte once into the parameters of vLLM, whose ranks hold what a fresh load would have given."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.conftest import vllm_python
from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("vllm_copies.py")
# The scales of vLLM's attention layers, which it writes at the end of every update.
BESIDE = 64
SHAPE: dict[str, Any] = {
    "vocab_size": 150,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def loaded(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank says."""
    nobind = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    port, found = str(free_port()), []
    logs = [folder / f"{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        command = [vllm_python(), str(SCRIPT), str(folder), str(rank), str(ranks), port]
        with log.open("w") as output:
            processes.append(subprocess.Popen(command, env=os.environ | nobind, stdout=output, stderr=output))
    for process, log in zip(processes, logs, strict=True):
        assert process.wait(500) == 0, log.read_text()[-4000:]
        found += [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"updates"')]
    assert len(found) == ranks
    return found


@pytest.mark.parametrize(("ranks", "tied"), [(1, False), (2, False), (2, True)])
def test_after_the_first_update_every_byte_is_copied_once(ranks: int, tied: bool, tmp_path: Path) -> None:
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=tied)).save_pretrained(tmp_path)
    for told in loaded(tmp_path, ranks):
        first, cut, last = told["updates"]
        assert first["equal"] and cut["equal"] and last["equal"]
        assert not cut["rest"] and not last["rest"]
        assert told["size"] <= last["bytes"] <= told["size"] + BESIDE
        # What a tensor's rows are padded with is written again with every part of it that comes by itself.
        assert cut["bytes"] < first["bytes"] and first["bytes"] > 2.5 * last["bytes"]


def test_experts_alone_are_left_to_vllm(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts)).save_pretrained(tmp_path)
    ((first, cut, last),) = (told["updates"] for told in loaded(tmp_path, 1))
    assert first["equal"] and cut["equal"] and last["equal"]
    assert last["rest"] == cut["rest"] == [name for name in first["rest"] if ".experts." in name]
    assert last["bytes"] < first["bytes"]
