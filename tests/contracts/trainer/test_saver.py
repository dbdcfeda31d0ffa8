"""Checkpoints written in the background by real processes, read by other numbers of ranks, or held up by a freeze."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_async.configs.schema.algorithm import AlgorithmConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import CheckpointFailed, TrainerReplaced, UserError
from rl_async.files import append_durably
from rl_async.trainer.actor_critic import build_models
from rl_async.trainer.checkpoints import FORMAT, CheckpointState, Saver, drop_unfinished, load_checkpoint, newest_whole
from rl_async.trainer.export import export
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.records import next_lineage, require_newest
from tests.contracts.trainer.workers.critic import train
from tests.support.forked import Forked, joined, run_ranks
from tests.support.torchao import add_torchao

# Ranks that make a checkpoint out of trained weights, or go on from one.


@joined()
def resharding_rank(model: str, root: str, before: str, after: str, options: str) -> None:
    """Load the checkpoint of step ``before``, unless that is 0; train up to ``after`` steps and save them.

    Rank 0 leaves every tensor, put together, in loaded-N and saved-N.safetensors, N being the number of ranks.
    """
    folder, first, last = Path(root), int(before), int(after)
    training = TrainerConfig(learning_rate=1e-3, minibatches=2, max_tokens_per_microbatch=60, **json.loads(options))
    if training.optimizer == "adamw_8bit":
        add_torchao()
    config = RunConfig(
        model=ModelConfig(path=model, dtype="float32"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(correction="bypass_ppo_clip"),
        trainer=training,
    )
    models = build_models(config, "cpu")
    if first:
        load_checkpoint(folder / f"step-{first:06d}", models.trained())
    leave_tensors(models.policy, folder / f"loaded-{dist.get_world_size()}.safetensors")
    saver = Saver(folder, keep=9, timeout_s=60)
    for step in range(first, last):
        train(models, step, config)
    state = CheckpointState(step=last, lineage=0, kl_coef=0.0, format=FORMAT)
    saver.save(models.trained(), state, b"")
    leave_tensors(models.policy, folder / f"saved-{dist.get_world_size()}.safetensors")
    train(models, last, config)  # while it is written: the copy must not change
    saver.wait()


def leave_tensors(policy: object, path: Path) -> None:
    """Weights, and what AdamW keeps."""
    assert isinstance(policy, Fsdp2Backend) and policy.optimizer is not None
    tensors = {}
    for name, parameter in policy.model.named_parameters():
        tensors[name] = parameter.full_tensor().detach().clone()
        for key, value in policy.optimizer.state.get(parameter, {}).items():
            tensors[f"{name}|{key}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    if dist.get_rank() == 0:
        save_file(tensors, path)


WAIT_S = 60.0


class Half:
    """A backend of which a test decides what its writer does, halfway through its file."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self._then = then

    def stage(self, folder: Path, group: object) -> Callable[[], None]:
        def write() -> None:
            with (folder / "weights").open("wb") as file:
                file.write(b"half")
                file.flush()
                self._then()
                file.write(b"whole")

        return write


def save(saver: Saver, step: int, backend: Any, lineage: int = 0) -> None:
    state = CheckpointState(step=step, lineage=lineage, kl_coef=0.0, format=FORMAT)
    saver.save({".": backend}, state, b"snapshot of %d" % lineage)


def until_killed(root: Path) -> None:
    """In a process of its own: save step 2, then half of step 4, and say so."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saver = Saver(root, keep=1, timeout_s=WAIT_S)
    save(saver, 2, Half())
    halfway = threading.Event()

    def stay() -> None:
        halfway.set()
        threading.Event().wait(WAIT_S)

    save(saver, 4, Half(stay))
    assert halfway.wait(WAIT_S)
    print("half written", flush=True)
    saver.wait()


def test_a_checkpoint_killed_halfway_is_never_picked_up(tmp_path: Path, one_rank: None) -> None:
    victim = Forked("tests.contracts.trainer.test_saver", str(tmp_path))
    assert victim.first_line() == "half written"
    victim.kill()
    victim.communicate()
    assert (tmp_path / ".step-000004.lineage0.tmp" / "weights").read_bytes() == b"half"
    assert newest_whole(tmp_path) == tmp_path / "step-000002"
    saver = Saver(tmp_path, keep=1, timeout_s=WAIT_S)
    save(saver, 4, Half())
    saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]
    assert (tmp_path / "step-000004" / "weights").read_bytes() == b"halfwhole"


def test_training_goes_on_while_it_is_written_and_the_next_one_waits(tmp_path: Path, one_rank: None) -> None:
    saver = Saver(tmp_path, keep=9, timeout_s=WAIT_S)
    go_on = threading.Event()
    save(saver, 1, Half(lambda: assert_(go_on.wait(WAIT_S))))
    assert saver.durable() is None and newest_whole(tmp_path) is None, "save returned before anything was there"
    threading.Timer(0.2, go_on.set).start()
    save(saver, 2, Half(lambda: assert_(newest_whole(tmp_path) == tmp_path / "step-000001")))
    assert newest_whole(tmp_path) is not None, "the first was there before the second was begun"
    saver.wait()
    assert saver.durable() == 2 and saver.durable() is None, "said once"


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_a_failure_in_the_background_is_raised_by_name(tmp_path: Path, one_rank: None, kind: type[Exception]) -> None:
    saver = Saver(tmp_path, keep=9, timeout_s=WAIT_S)
    save(saver, 3, Half())
    saver.wait()
    full = kind("No space left on device")
    save(saver, 5, Half(lambda: raise_(full)))
    with pytest.raises(CheckpointFailed, match=r"step 5: .*No space left on device"):
        saver.wait()
    assert newest_whole(tmp_path) == tmp_path / "step-000003"


def test_a_folder_that_cannot_be_made_is_an_error_by_name(tmp_path: Path, one_rank: None) -> None:
    (tmp_path / "file").touch()
    saver = Saver(tmp_path / "file" / "checkpoints", keep=9, timeout_s=WAIT_S)
    with pytest.raises(CheckpointFailed, match=r"step 3: rank 0: .*Not a directory"):
        save(saver, 3, Half())


def test_one_that_takes_too_long_is_an_error(tmp_path: Path, one_rank: None) -> None:
    saver = Saver(tmp_path, keep=9, timeout_s=0.2)
    end = threading.Event()
    save(saver, 1, Half(lambda: assert_(end.wait(WAIT_S))))
    with pytest.raises(CheckpointFailed, match=r"step 1\b.*not written"):
        saver.wait()
    end.set()


def assert_(said: bool) -> None:
    assert said


def raise_(error: Exception) -> None:
    raise error


def test_a_replaced_trainer_gives_no_checkpoint_a_name_and_deletes_none(tmp_path: Path, one_rank: None) -> None:
    root = tmp_path / "checkpoints"
    lineage = next_lineage(tmp_path, resuming=False)
    saver = Saver(root, 1, WAIT_S, check_lineage=lambda: require_newest(tmp_path, lineage))
    save(saver, 2, Half())
    saver.wait()
    save(saver, 4, Half(lambda: assert_(next_lineage(tmp_path, resuming=True) == 1)))
    with pytest.raises(TrainerReplaced):
        saver.wait()
    assert newest_whole(root) == root / "step-000002"
    assert saver.durable() == 2, "the queue hears of no other"


@pytest.mark.parametrize("swept", [False, True])
def test_a_trainer_that_was_frozen_while_it_wrote_leaves_its_successor_s_checkpoint_of_that_step_whole(
    tmp_path: Path, one_rank: None, swept: bool
) -> None:
    root, thawed = tmp_path / "checkpoints", threading.Event()
    next_lineage(tmp_path, resuming=False)
    old = Saver(root, 1, WAIT_S, check_lineage=lambda: require_newest(tmp_path, 0))
    save(old, 2, Half(lambda: assert_(thawed.wait(WAIT_S))))
    assert next_lineage(tmp_path, resuming=True) == 1
    if swept:
        drop_unfinished(root)

    def thaw() -> None:
        """When the successor's files and their checksums are written."""
        if not thawed.is_set():
            thawed.set()
            with pytest.raises(TrainerReplaced):
                old.wait()

    new = Saver(root, 1, WAIT_S, check_lineage=thaw)
    save(new, 2, Half(), lineage=1)
    new.wait()
    assert newest_whole(root) == root / "step-000002"
    assert (root / "step-000002" / "queue.msgpack").read_bytes() == b"snapshot of 1"


def test_a_replaced_trainer_that_named_its_checkpoint_at_the_last_moment_deletes_none(
    tmp_path: Path, one_rank: None
) -> None:
    names: list[list[str]] = []

    def check() -> None:
        names.append(sorted(path.name for path in tmp_path.glob("step-*")))
        if len(names) == 4:
            raise TrainerReplaced("by lineage 1")

    saver = Saver(tmp_path, 1, WAIT_S, check_lineage=check)
    save(saver, 2, Half())
    save(saver, 4, Half())
    with pytest.raises(TrainerReplaced):
        saver.wait()
    assert names[2:] == [["step-000002"], ["step-000002", "step-000004"]]
    assert (tmp_path / "step-000002").is_dir()


def go_on(model: Path, root: Path, ranks: int, before: int, after: int, **options: Any) -> None:
    """Run ``reshard_worker`` on ``ranks`` processes."""
    arguments = [str(model), str(root), str(before), str(after), json.dumps(options)]
    run_ranks("tests.contracts.trainer.test_saver:resharding_rank", *arguments, ranks=ranks)


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)


@pytest.mark.timeout(600)
def test_checkpoints_go_on_with_other_numbers_of_ranks_and_replicas(model_folder: Path, tmp_path: Path) -> None:
    root, run = tmp_path / "checkpoints", tmp_path
    root.mkdir()
    go_on(model_folder, root, 2, 0, 1, checkpoint_hf=False)
    go_on(model_folder, root, 1, 1, 2)
    go_on(model_folder, root, 4, 2, 3, replicas=2)
    names = ("saved-2", "loaded-1", "saved-1", "loaded-4", "saved-4")
    left = {name: load_file(root / f"{name}.safetensors") for name in names}
    assert same(left["saved-2"], left["loaded-1"]) and same(left["saved-1"], left["loaded-4"])
    go_on(model_folder, root, 2, 3, 4)
    assert same(left["saved-4"], load_file(root / "loaded-2.safetensors"))
    moments = [name for name in left["loaded-4"] if name.endswith("|exp_avg")]
    assert moments and all(left["loaded-4"][name].any() for name in moments), "AdamW's state came along"
    assert not same(left["saved-2"], left["saved-1"]), "a step changes the weights"

    assert newest_whole(root) == root / "step-000004"
    assert len(list((root / "step-000004" / "shards").iterdir())) == 2, "every rank wrote its part"
    assert not list(root.glob(".*")), "nothing unfinished is left"
    assert not (root / "step-000001" / "model" / "model.safetensors").exists()
    assert export(run, tmp_path / "first", step=1) == 1
    for folder, left_by in ((tmp_path / "first", "saved-2"), (root / "step-000002" / "model", "saved-1")):
        weights = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        assert all(weights[name].equal(tensor) for name, tensor in weights_of(left[left_by]).items())
    with pytest.raises(UserError, match=r"step 7\b.* 1, 2, 3, 4"):
        export(run, tmp_path / "none", step=7)
    with pytest.raises(UserError, match=r"no adapters.*--adapter"):
        export(run, tmp_path / "none", merge=False)


def weights_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under their names in a Hugging Face model."""
    return {name.removeprefix("lm."): tensor for name, tensor in tensors.items() if "|" not in name}


FROZEN = """
import os, sys
from pathlib import Path
from rl_async import files

def freeze(descriptor):
    print("frozen", flush=True)
    sys.stdin.read()

os.fsync = freeze
files.append_durably(Path(sys.argv[1]), b"old\\n", 3)
"""


def test_only_its_own_lineage_waits_for_a_frozen_writer(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    command = [sys.executable, "-c", FROZEN, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as frozen:
        assert frozen.stdin is not None and frozen.stdout is not None
        assert frozen.stdout.readline() == b"frozen\n"
        append_durably(path, b"new\n", 4)
        with pytest.raises(TimeoutError, match=path.name):
            append_durably(path, b"rank\n", 3, wait_s=0.1)
        frozen.stdin.close()
    append_durably(path, b"rank\n", 3)
    assert path.read_bytes() == b"old\nnew\nrank\n"


if __name__ == "__main__":
    until_killed(Path(sys.argv[1]))
