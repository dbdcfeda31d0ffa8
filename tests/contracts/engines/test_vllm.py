"""vLLM that guesses tokens by n-grams and checks several at once: what it reports of them, also over an update."""

import ast
import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_async.configs.engines import VLLM, in_range
from rl_async.messages import Sampling, Version
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.rollout_server.vllm import versions
from rl_async.rollout_server.vllm.versions import (
    COUNTED_VERSIONS,
    DIVIDED_EXPERTS_ON_CPU,
    EXPERTS_ON_CPU,
    FURTHER_NODES,
    SCALE_OUT,
    TOKEN_VERSIONS,
    TOUCHED,
    TOUCHED_ON_CPU,
    Names,
)
from tests.conftest import vllm_python
from tests.contracts.engines.conftest import Connect
from tests.contracts.engines.engine_peers import (
    Peer,
    errors,
    log_probabilities,
    metric,
    paused,
    running,
    scaled,
    send,
    tensors,
)
from tests.support.ports import free_port
from tests.support.rounding import PlainPass

# vLLM takes minutes to start on a busy machine.

NGRAMS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
V0, V1 = Version(0, 0), Version(0, 1)
# A cool, sharp model repeats itself, so that guesses are right.
COOL = Sampling(temperature=0.4)
SHARP = 2.0


@pytest.fixture(scope="module")
def peer(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    flags = ("--speculative-config", NGRAMS)
    with running("vllm", model_folder, tmp_path_factory.mktemp("run"), eager=True, flags=flags) as started:
        yield started


def ask(number: int, max_tokens: int = 256) -> GenerateRequest:
    ids = [(5 * i + number) % 40 for i in range(8)] * 3
    return GenerateRequest(
        request_id=f"r{number}", token_ids=ids, max_tokens=max_tokens, sampling=COOL, stop_token_ids=[]
    )


def guessed(model: Any, request: GenerateRequest, got: GenerateResult) -> torch.Tensor:
    """Of each sampled token with a guess: whether it is the guess, and the guess's probability, [tokens, 2].

    The guess repeats what followed the last occurrence of the token before.
    """
    ids, start = request.token_ids + got.token_ids, len(request.token_ids)
    chance = log_probabilities(model, ids, request.sampling.temperature).exp()
    found = []
    for at in range(start, len(ids)):
        earlier = [i for i in range(1, at) if ids[i - 1] == ids[at - 1]]
        if earlier:
            found.append([float(ids[at] == ids[earlier[-1]]), chance[at - 1, ids[earlier[-1]]].item()])
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_accepted_and_refused_guesses_have_the_logprobs_of_a_plain_pass(
    connect: Connect, peer: Peer, model_folder: Path
) -> None:
    engine = connect()
    await send(engine, tensors(model_folder, SHARP), V0)
    requests = [ask(number) for number in range(12)]
    answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    model = scaled(model_folder, SHARP)
    plain = PlainPass(model)
    worst = max(errors(plain, r, got).max().item() for r, got in zip(requests, answers, strict=True))
    accepted = await metric(peer, ACCEPTED)
    assert 0 < accepted < 12 * 256, "nothing was guessed, or everything"
    assert worst <= 1
    # A sampler that prefers guesses, or avoids them, is far off: the sum is one of independent terms of mean 0.
    came, chance = torch.cat([guessed(model, r, got) for r, got in zip(requests, answers, strict=True)]).T
    assert ((came - chance).sum() / (chance * (1 - chance)).sum().sqrt()).abs() < 5


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_an_update_changes_the_tokens_after_it_alone(connect: Connect, peer: Peer, model_folder: Path) -> None:
    engine = connect()
    await send(engine, tensors(model_folder, SHARP), V0)
    requests = [ask(number, 700) for number in range(4)]
    async with paused(engine, *requests) as tasks:
        await send(engine, tensors(model_folder, 1.5 * SHARP), V1)
    old, new = PlainPass(scaled(model_folder, SHARP)), PlainPass(scaled(model_folder, 1.5 * SHARP))
    for request, task in zip(requests, tasks, strict=True):
        got = await task
        assert [run.version for run in got.versions] == [V0, V1]
        boundary = got.versions[1].start
        assert errors(old, request, got)[:boundary].max() <= 1
        assert errors(new, request, got)[boundary:].max() <= 1


# The names that our plugin touches inside vLLM, looked up in the sources of versions that are not run here.


FOLDER = "RL_ASYNC_VLLM_SOURCES"
SOURCES = Path(os.environ.get(FOLDER, Path(__file__).parents[3] / ".vllm-sources"))
VERSIONS = sorted(path.name for path in SOURCES.glob("*") if (path / "vllm").is_dir())
ALL: Names = {**TOUCHED, **TOUCHED_ON_CPU}
# The versions that have the names of a feature: from the first to before the second.
SINCE = [
    (FURTHER_NODES, ">=0.26"),
    (TOKEN_VERSIONS, ">=0.32"),
    (EXPERTS_ON_CPU, ">=0.28"),
    (DIVIDED_EXPERTS_ON_CPU, ">=0.30"),
    (SCALE_OUT[0], ">=0.30,<0.33"),
    (SCALE_OUT[1], ">=0.33"),
]
BASE = "vllm/distributed/weight_transfer/base.py"


def missing(root: Path, wanted: Names = ALL) -> list[str]:
    """The names that the package in ``root`` lacks, or that lack a parameter that we pass."""
    found = []
    for module, names in wanted.items():
        path = root / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        here = defined(ast.parse(file.read_text()).body) if file.is_file() else {}
        for name, parameters in names.items():
            if not any(one in here and not set(parameters) - here[one] for one in name.split("|")):
                found.append(name)
    return found


def methods(file: Path, owner: str, *, abstract: bool = False) -> set[str]:
    """The methods that a class in ``file`` defines, or those of them that it leaves to others."""
    (found,) = (n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef) and n.name == owner)
    return {
        node.name
        for node in found.body
        if isinstance(node, ast.FunctionDef)
        and (not abstract or any(isinstance(d, ast.Name) and d.id == "abstractmethod" for d in node.decorator_list))
    }


def defined(body: list[ast.stmt], prefix: str = "") -> dict[str, set[str]]:
    """The names that statements define or import, of classes also their members, with the parameters of functions."""
    found: dict[str, set[str]] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            taken = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            found[prefix + node.name] = {argument.arg for argument in taken}
        elif isinstance(node, ast.ClassDef):
            found |= {prefix + node.name: set()} | defined(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {prefix + target.id: set() for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            found |= {prefix + (alias.asname or alias.name): set() for alias in node.names}
    return found


# The wheels are 1.1 GB to download.
@pytest.mark.nightly
@pytest.mark.skipif(not VERSIONS, reason=f"install them with scripts/install vllm-sources, or set {FOLDER}")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_has_the_names_that_it_needs(version: str) -> None:
    root = SOURCES / version
    assert in_range(version, VLLM.versions) and not missing(root) and not missing(root, COUNTED_VERSIONS)
    assert [not missing(root, names) for names, _ in SINCE] == [in_range(version, range_) for _, range_ in SINCE]
    ours = methods(Path(versions.__file__).with_name("slices.py"), "WeightTransfer")
    assert methods(root / BASE, "WeightTransferEngine", abstract=True) <= ours


def test_a_name_that_is_missing_or_takes_other_parameters_is_noticed(tmp_path: Path) -> None:
    for module in ALL:
        file = (tmp_path / module.replace(".", "/")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("class RequestState:\n    def _new_completion_output(self): ...\n")
    everything = [name for names in ALL.values() for name in names]
    assert missing(tmp_path) == [name for name in everything if name != "RequestState._new_completion_output"]
    fp8 = tmp_path / "vllm/model_executor/layers/quantization/online/fp8.py"
    fp8.write_text("class _Fp8OnlineLinearBase: ...\n")
    assert not any("OnlineLinearBase" in name for name in missing(tmp_path)), "an alternative is not enough"
    core = tmp_path / "vllm/v1/engine/core.py"
    core.write_text("class EngineCore:\n    def preprocess_add_request(self, other): ...\n")
    assert "EngineCore.preprocess_add_request" in missing(tmp_path)
    core.write_text("class EngineCore:\n    def preprocess_add_request(self, request): ...\n")
    assert "EngineCore.preprocess_add_request" not in missing(tmp_path)


@pytest.mark.slow
def test_the_installed_vllm_lacks_none_and_another_is_refused_by_name() -> None:
    program = """
import logging
from rl_async.rollout_server.vllm import versions as p
p.require_all("0.32.0", cpu=True)
p.TOUCHED["vllm.platforms"] = {"no_such_name": ()}
try:
    p.require_all("0.99.0", cpu=True)
except RuntimeError as error:
    assert "vLLM 0.99.0 has no vllm.platforms.no_such_name" in str(error), error
del p.TOUCHED["vllm.platforms"]
p.require_all("0.99.0", cpu=True)
"""
    done = subprocess.run([vllm_python(), "-P", "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "vLLM 0.99.0 has not been tried" in done.stderr


# An update copies each byte once into the parameters of vLLM, whose ranks hold what a fresh load would have given.


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
    """Run ``vllm_copies.py`` on each rank; what each printed."""
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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "ranks", "tied"), [(Qwen2ForCausalLM, 1, False), (Qwen3ForCausalLM, 2, False), (Qwen3ForCausalLM, 2, True)]
)
def test_after_the_first_update_every_byte_is_copied_once(kind: Any, ranks: int, tied: bool, tmp_path: Path) -> None:
    model = kind(kind.config_class(**SHAPE, tie_word_embeddings=tied))
    # Biases, which Qwen2 has, begin with 0.
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    for told in loaded(tmp_path, ranks):
        first, cut, last = told["updates"]
        assert first["equal"] and cut["equal"] and last["equal"]
        assert not cut["rest"] and not last["rest"]
        assert told["size"] <= last["bytes"] <= told["size"] + BESIDE
        # What a tensor's rows are padded with is written again with every part of it that comes by itself.
        assert cut["bytes"] < first["bytes"] and first["bytes"] > 2.5 * last["bytes"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_experts_alone_are_left_to_vllm(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts)).save_pretrained(tmp_path)
    ((first, cut, last),) = (told["updates"] for told in loaded(tmp_path, 1))
    assert first["equal"] and cut["equal"] and last["equal"]
    assert last["rest"] == cut["rest"] == [name for name in first["rest"] if ".experts." in name]
    assert last["bytes"] < first["bytes"]
