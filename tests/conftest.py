"""A tiny model folder and recorded batches for trainer tests.

Torch and Transformers are imported where a model is made: most tests need neither, and each takes seconds.
"""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from _pytest.assertion import rewrite

from rl_async.messages import Sampling, Trajectory, Version, VersionRun
from tests.support.seed import SessionSeed

pytest_plugins = ["tests.support.outcomes", "tests.support.simulated_time"]

VOCAB = 64
VLLM_PYTHON = "RL_ASYNC_VLLM_PYTHON"


# Under nohup this session ignores SIGHUP, and processes would start with that. A handler of its own ends neither it nor
# is it handed on.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# torch's TCPStore looks up the name of each peer's address before it connects. One lost answer of a resolver would cost
# a test the default of 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A busy machine fails no test, and where a CI is recognised, examples come from the session's seed all the same.
hypothesis.settings.register_profile("no deadline", deadline=None, derandomize=False)
hypothesis.settings.load_profile("no deadline")


def pytest_configure(config: pytest.Config) -> None:
    # A script's job in the background ignores Ctrl-C, which programs under test would inherit, and then keep ignoring.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(SessionSeed(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Have xdist fork its workers from the tests' fork server instead of starting an interpreter for each."""
    import execnet.gateway_io

    from tests.support.forked_workers import ForkedWorker

    execnet.gateway_io.Popen2IOMaster = ForkedWorker  # type: ignore[misc]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep modules and test items, nearly a million objects that live until the end, out of garbage collections."""
    rewrite_share(session.config)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def rewrite_share(config: pytest.Config) -> None:
    """Rewrite the assertions of every n-th test module, as one of n workers, into the cache that all of them read.

    After a checkout each worker would otherwise rewrite all modules, in 8 s of processor time.
    """
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    places = [Path(argument.partition("::")[0]).absolute() for argument in config.args]
    modules = sorted(module for place in places for module in place.rglob("test_*.py"))
    for module in modules[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        cached = rewrite.get_cache_dir(module) / f"{module.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(module, cached) is None and rewrite.try_makedirs(cached.parent):
            source_hash, code = rewrite._rewrite_test(module, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, cached)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave each ``keep``-th row of a table to ``make test`` and the others to ``make test-slow``.

    For tables whose rows each cost processes: neighbouring rows are of one kind, and the code is the same for all.
    """
    for item in items:
        for mark in item.iter_markers("thinned"):
            parameter, keep = mark.args
            assert isinstance(item, pytest.Function)
            if item.callspec.indices[parameter] % keep:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Escape half surrogate pairs, which logs of a passing test may contain, and which would end a worker of xdist."""
    return _escaped((yield))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _escaped(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_escaped, value))
    return value


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of 2 layers, with a word-level tokenizer."""
    return make_model(tmp_path_factory.mktemp("model"))


def make_model(folder: Path) -> Path:
    """Write the model of ``model_folder``."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(tiny_config(tie_word_embeddings=True)).save_pretrained(folder)
    return save_tokenizer(folder)


def tiny_config(**options: Any) -> Any:
    """The config of a Qwen3 of 2 layers, with options changed or added."""
    from transformers import Qwen3Config

    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    return Qwen3Config(**(sizes | heads | options))


def save_tokenizer(folder: Path) -> Path:
    """Write a word-level tokenizer of VOCAB words into a model's folder."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0").save_pretrained(folder)
    return folder


def vllm_python() -> str:
    """A Python that has vLLM and the plugin; skips the test if there is none."""
    root = Path(__file__).parents[1]
    for python in (os.environ.get(VLLM_PYTHON), root / ".venv-vllm" / "bin" / "python"):
        if python and Path(python).is_file():
            return str(python)
    pytest.skip(f"vLLM is not here; install it with scripts/install vllm, or set {VLLM_PYTHON}")


def make_rows(step: int, groups: int = 4, samples: int = 4, seed: int = 0) -> list[Trajectory]:
    """Random trajectories of unequal length whose behaviour log-probabilities are plausible."""
    draw = np.random.default_rng([seed, step])
    rows = []
    for group in range(step * groups, (step + 1) * groups):
        for sample in range(samples):
            length = int(draw.integers(8, 20))
            mask = np.arange(length) >= 4
            rows.append(
                Trajectory(
                    task_id=f"t{group}",
                    group_id=group,
                    sample=sample,
                    attempt=0,
                    episode_id=f"{group}-{sample}",
                    token_ids=draw.integers(0, VOCAB, length).astype(np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask, -np.log(VOCAB) + 0.1 * draw.standard_normal(length), 0).astype(np.float32),
                    versions=[VersionRun(Version(0, step), 0, int(mask.sum()))],
                    sampling=Sampling(),
                    reward=float(draw.integers(0, 2)),
                )
            )
    return rows


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Collectives among this process alone, also on a GPU where there is one."""
    import torch
    from torch import distributed as dist

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
