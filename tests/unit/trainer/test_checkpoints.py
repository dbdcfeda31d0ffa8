"""Checkpoints on disk: when they are written, and which of them a run resumes from."""

import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from rl_async.configs.schema.algorithm import AlgorithmConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import QueueConfig, RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import CheckpointDamaged
from rl_async.model_files import experts_of
from rl_async.trainer.actor_critic import Models, build_models
from rl_async.trainer.checkpoints import (
    FORMAT,
    MOMENT,
    CheckpointSchedule,
    CheckpointState,
    Part,
    Saver,
    StoredShards,
    begin,
    digest,
    drop_unfinished,
    files_in,
    list_checkpoints,
    load_checkpoint,
    newest_whole,
    own_parts,
    prune,
    publish,
    temporary_folder,
    write_manifest,
    write_shards,
    write_whole,
)
from rl_async.trainer.export import SHARDS, WEIGHTS, WHOLE, export, write_model
from rl_async.trainer.families import FAMILIES
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.model import MODEL_FOLDER, build_headed
from rl_async.weight_sync.layout import PUBLISHED
from tests.contracts.trainer.workers.critic import CRITICS, state, train
from tests.support.families import COMMON, SPECIAL

pytestmark = pytest.mark.usefixtures("one_rank")


def due(steps: int, every: int, batch_bytes: int, max_bytes: int = 1000) -> list[int]:
    """The completed steps after which a run of ``steps`` writes a checkpoint."""
    schedule = CheckpointSchedule(
        RunConfig(
            model=ModelConfig(path="m"),
            data=DataConfig(path="d"),
            queue=QueueConfig(max_bytes=max_bytes),
            trainer=TrainerConfig(steps=steps, checkpoint_every=every),
        )
    )
    return [step for step in range(1, steps + 1) if schedule.is_due(step, batch_bytes)]


def test_checkpoints_are_regular_and_at_the_end() -> None:
    assert due(7, 3, batch_bytes=0) == [3, 6, 7]
    assert due(7, 0, batch_bytes=0) == [7]


def test_trained_payloads_never_fill_more_than_half_of_the_queue(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert due(7, 0, batch_bytes=200) == [3, 6, 7]
    assert len(caplog.messages) == 2 and all("queue.max_bytes" in message for message in caplog.messages)
    assert due(7, 2, batch_bytes=200) == [2, 4, 6, 7]
    assert due(3, 0, batch_bytes=5000) == [1, 2, 3]


SHARD = "shards/shard-00001.safetensors"


def make(root: Path, step: int, keep: int = 9, version: int = FORMAT, lineage: int = 0, resumed: int = 0) -> Path:
    """A checkpoint in the place of tensors of which is text."""
    folder = temporary_folder(root, step, lineage)
    begin(folder, [".", "shards"])
    (folder / SHARD).write_bytes(b"weights of step %d" % step)
    state = CheckpointState(step=step, lineage=lineage, kl_coef=0.0, format=version)
    (folder / "state.json").write_bytes(msgspec.json.encode(state))
    write_manifest(folder, {name: digest(folder / name) for name in files_in(folder)})
    publish(folder, root, step)
    prune(root, keep, {step, resumed})
    return root / f"step-{step:06d}"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def write_no_utf_8(path: Path) -> None:
    path.write_bytes(b'{"\xff": {}}' if path.name == "manifest.json" else b'{"format": 2, "queue": "\xff"}')


def nest_deeply(path: Path) -> None:
    path.write_bytes(b'{"x": ' + b"[" * 100_000)


@pytest.mark.parametrize("harm", [flip_a_bit, truncate, Path.unlink, write_no_utf_8, nest_deeply])
@pytest.mark.parametrize("name", [SHARD, "manifest.json", "state.json"])
def test_damage_is_found_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None], name: str
) -> None:
    older, newer = make(tmp_path, 2), make(tmp_path, 4)
    assert newest_whole(tmp_path) == newer
    harm(newer / name)
    listed = (newer / "state.json").exists()
    with caplog.at_level(logging.WARNING):
        assert newest_whole(tmp_path) == older
    if listed:
        assert str(newer) in caplog.text
        if name != "manifest.json":
            assert str(newer / name) in caplog.text
        assert (tmp_path / "step-000004.damaged" / "state.json").exists() and not newer.exists()
    harm(older / SHARD)
    with pytest.raises(CheckpointDamaged, match=str(older / SHARD)):
        newest_whole(tmp_path)


def test_every_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    folder = make(tmp_path, 2)
    whole = (folder / "manifest.json").read_bytes()
    for place in range(len(whole)):
        (folder / "manifest.json").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointDamaged):
            newest_whole(tmp_path)
    (folder / "manifest.json").write_bytes(whole)
    assert newest_whole(tmp_path) == folder


def test_only_the_newest_are_kept_and_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        make(tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000004", "step-000006"]
    (tmp_path / "step-000006" / "old").touch()
    make(tmp_path, 6, keep=2)
    assert not (tmp_path / "step-000006" / "old").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000006"], "nothing else is left"


def test_a_damaged_checkpoint_displaces_no_good_one(tmp_path: Path) -> None:
    good, damaged = make(tmp_path, 10), make(tmp_path, 20)
    truncate(damaged / SHARD)
    assert newest_whole(tmp_path) == good
    written = make(tmp_path, 12, keep=1, lineage=1, resumed=10)
    assert list_checkpoints(tmp_path) == [good, written], "neither the one just written nor the one resumed from goes"
    written = make(tmp_path, 14, keep=1, lineage=1, resumed=10)
    assert list_checkpoints(tmp_path) == [good, written]
    truncate(make(tmp_path, 20, lineage=1) / SHARD)
    assert newest_whole(tmp_path) == written
    assert sorted(path.name for path in tmp_path.glob("*.damaged*")) == ["step-000020.damaged", "step-000020.damaged1"]


def test_all_damaged_ones_stay_where_they_are(tmp_path: Path) -> None:
    folders = [make(tmp_path, 10), make(tmp_path, 20)]
    for folder in folders:
        truncate(folder / SHARD)
    for _ in range(2):
        with pytest.raises(CheckpointDamaged):
            newest_whole(tmp_path)
    assert list_checkpoints(tmp_path) == folders


def test_one_of_a_newer_lineage_is_newer_whatever_its_step(tmp_path: Path) -> None:
    abandoned, newest = make(tmp_path, 20), make(tmp_path, 12, lineage=1)
    assert newest_whole(tmp_path) == newest
    assert list_checkpoints(tmp_path) == [abandoned, newest]
    make(tmp_path, 14, keep=2, lineage=1)
    assert not abandoned.exists()


def test_what_is_half_written_is_never_listed_and_goes_at_the_next_start(tmp_path: Path) -> None:
    whole = make(tmp_path, 2)
    half = temporary_folder(tmp_path, 4, 0)
    begin(half, [".", "critic"])
    (half / "state.json").write_bytes((whole / "state.json").read_bytes())
    assert newest_whole(tmp_path) == whole
    drop_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [whole]


def test_the_first_format_is_taken_as_it_is_and_a_later_one_is_refused(tmp_path: Path) -> None:
    first = make(tmp_path, 2)
    (first / "state.json").write_text('{"step":2,"lineage":0,"kl_coef":0.0}')
    (first / "manifest.json").unlink()
    assert newest_whole(tmp_path) == first
    later = make(tmp_path, 4, version=FORMAT + 1)
    with pytest.raises(CheckpointDamaged, match=f"{later}.* format {FORMAT + 1}"):
        newest_whole(tmp_path)


def test_there_need_not_be_any(tmp_path: Path) -> None:
    assert newest_whole(tmp_path / "checkpoints") is None


WHOLE_TENSORS = torch.arange(28.0).reshape(7, 4)
BOXES = [
    (slice(0, 1), slice(0, 3)),
    (slice(0, 1), slice(3, 4)),
    (slice(1, 5), slice(0, 4)),
    (slice(5, 7), slice(0, 2)),
    (slice(5, 7), slice(2, 4)),
]


def stored(parts: list[Part], folder: Path) -> StoredShards:
    write_shards(parts, folder, None)
    return StoredShards(folder)


def boxes(name: str, whole: Tensor) -> list[Part]:
    return [Part(name, box, whole[box].clone()) for box in BOXES]


def test_a_rank_may_hold_several_boxes_of_a_tensor(tmp_path: Path) -> None:
    scalar = Part("steps", (), torch.tensor(3))
    shards = stored([scalar, *boxes("a", WHOLE_TENSORS), *boxes("b", -WHOLE_TENSORS)], tmp_path)
    assert shards.sizes == {"steps": (), "a": WHOLE_TENSORS.shape, "b": WHOLE_TENSORS.shape}
    assert (
        shards.whole("a").equal(WHOLE_TENSORS)
        and shards.whole("b").equal(-WHOLE_TENSORS)
        and int(shards.whole("steps")) == 3
    )
    where = (slice(0, 6), slice(2, 4))
    part = torch.zeros(6, 2, dtype=torch.bfloat16)
    shards.read_into(part, "a", where, WHOLE_TENSORS.shape)
    assert part.equal(WHOLE_TENSORS[where].bfloat16())


def test_an_expert_can_be_read_out_of_a_stack_by_its_own_name(tmp_path: Path) -> None:
    names = {"gate_up_proj": (3, 8, 5), "down_proj": (3, 5, 4)}
    stacks = {name: torch.arange(float(math.prod(size))).reshape(size) for name, size in names.items()}
    parts = []
    for name, whole in stacks.items():
        for kind, sign in (("", 1), (f"{MOMENT}exp_avg", -1)):
            for experts in (slice(0, 2), slice(2, 3)):
                place = experts, *(slice(0, size) for size in whole.shape[1:])
                parts.append(Part(f"mlp.experts.{name}{kind}", place, sign * whole[experts]))
    shards = stored(parts, tmp_path)
    up = torch.zeros(4, 5)
    shards.read_into(up, "mlp.experts.2.up_proj.weight")
    assert up.equal(stacks["gate_up_proj"][2, 4:])
    rows = torch.zeros(2, 3)
    shards.read_into(rows, "mlp.experts.1.down_proj.weight|exp_avg", (slice(3, 5), slice(1, 4)), (5, 4))
    assert rows.equal(-stacks["down_proj"][1, 3:5, 1:4])
    with pytest.raises(ValueError, match=r"2\.up_proj\.weight"):
        shards.read_into(torch.zeros(8, 5), "mlp.experts.2.up_proj.weight")
    with pytest.raises(KeyError):
        shards.read_into(up, "mlp.experts.3.up_proj.weight")


def test_what_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    shards = stored(boxes("a", WHOLE_TENSORS)[:2] + boxes("a", WHOLE_TENSORS)[3:], tmp_path)
    with pytest.raises(ValueError, match=r"\ba\b.* 16 "):
        shards.whole("a")
    with pytest.raises(ValueError, match=r"\ba\b.*\[7, 4\].*\[4, 7\]"):
        shards.read_into(torch.zeros(4, 7), "a")
    rest = torch.zeros(2, 4)
    shards.read_into(rest, "a", (slice(5, 7), slice(0, 4)), (7, 4))
    assert rest.equal(WHOLE_TENSORS[5:])


SPARSE = sorted(PUBLISHED)


def shallow(kind: str) -> dict[str, int]:
    """Options for two layers, unless the config lists each."""
    return {} if SPECIAL[kind].keys() & {"layer_types", "layers_block_type"} else {"num_hidden_layers": 2}


def checkpoint(kind: str, folder: Path) -> Path:
    """The shards of a random model, with its published form beside them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(COMMON | SPECIAL[kind] | shallow(kind)))
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "published")
    config.save_pretrained(folder / MODEL_FOLDER)
    state = {f"{WEIGHTS}{name}": parameter.detach() for name, parameter in model.named_parameters()}
    state |= {f"{WEIGHTS}{name}": buffer for name, buffer in model.named_buffers() if "bias" in name}
    write_shards(list(own_parts(state)), folder / SHARDS, None)
    return folder


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ("mixtral", "qwen3_moe"))) for kind in SPARSE]
)
def test_names_and_weights_are_those_of_published_files(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path)
    write_model(folder)
    published = load_file(folder / "published" / WHOLE)
    found = load_file(folder / MODEL_FOLDER / WHOLE)
    assert found.keys() == published.keys()
    assert all(found[name].equal(tensor) for name, tensor in published.items())


@pytest.mark.parametrize(
    "kind",
    [
        *("mixtral", "qwen3_moe", "gpt_oss"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in SPARSE if kind not in ("mixtral", "qwen3_moe")),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("granitemoehybrid", "nemotron_h", "qwen3_5_text")),
    ],
)
def test_exports_are_loaded_whole(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path)
    write_model(folder)
    build_headed(str(folder / MODEL_FOLDER), "policy")
    _, info = AutoModelForCausalLM.from_pretrained(folder / MODEL_FOLDER, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_experts_of_a_family_without_known_names_stay_stacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("qwen3_moe", tmp_path)
    monkeypatch.delitem(PUBLISHED, "qwen3_moe")
    write_model(folder)
    with safe_open(folder / MODEL_FOLDER / WHOLE, "pt") as file:
        assert "model.layers.0.mlp.experts.gate_up_proj" in file.keys()  # noqa: SIM118  # not a mapping
    build_headed(str(folder / MODEL_FOLDER), "policy")


def test_names_are_known_for_all_families_with_experts() -> None:
    sparse = {kind for kind in FAMILIES if experts_of(AutoConfig.for_model(kind, **(COMMON | SPECIAL.get(kind, {}))))}
    stacked = {"gpt_oss", "granitemoe", "granitemoehybrid", "kimi_linear", "nemotron_h"}
    assert sparse == PUBLISHED.keys() | stacked


# A checkpoint as the first format had it, made out of one of today: whole tensors, no manifest, no format.


def moments(models: Models) -> dict[str, Tensor]:
    found = {}
    for folder, model in models.trained().items():
        assert isinstance(model, Fsdp2Backend) and model.optimizer is not None
        for name, parameter in model.model.named_parameters():
            for key, value in model.optimizer.state[parameter].items():
                found[f"{folder}.{name}.{key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def made_first(checkpoint: Path, models: Models) -> None:
    """Rewrite it as the first format."""
    for name in models.trained():
        folder = checkpoint / name
        write_whole(folder / SHARDS, folder / "optimizer.safetensors", lambda n: n if MOMENT in n else None)
        shutil.rmtree(folder / SHARDS)
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "state.json").write_text('{"step":2,"lineage":1,"kl_coef":0.25}')


# The learning rate goes on from where the schedule was.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("kind", CRITICS)
def test_it_is_gone_on_from_and_exported(model_folder: Path, tmp_path: Path, kind: str) -> None:
    config = RunConfig(
        model=ModelConfig(path=str(model_folder), dtype="float32"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(advantage="gae", correction="bypass_ppo_clip"),
        critic=CRITICS[kind],
        trainer=TrainerConfig(learning_rate=1e-3, minibatches=1, max_tokens_per_microbatch=60),
    )
    models = build_models(config, "cpu")
    for step in range(2):
        train(models, step, config)
    saver = Saver(tmp_path / "checkpoints", keep=1, timeout_s=60)
    saver.save(models.trained(), CheckpointState(step=2, lineage=1, kl_coef=0.25, format=FORMAT), b"snapshot")
    saver.wait()
    checkpoint = tmp_path / "checkpoints" / "step-000002"
    made_first(checkpoint, models)

    again = build_models(config, "cpu")
    assert newest_whole(tmp_path / "checkpoints") == checkpoint
    assert load_checkpoint(checkpoint, again.trained()) == (CheckpointState(2, 1, 0.25), b"snapshot")
    weights, read = (state(one, tmp_path / name) for one, name in ((models, "written"), (again, "read")))
    for found, wanted in ((read, weights), (moments(again), moments(models))):
        assert found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)

    (tmp_path / ".policy.12345").mkdir()  # of an export that was killed
    assert export(tmp_path, tmp_path / "policy") == 2
    assert not list(tmp_path.glob(".policy.*"))
    policy = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "policy").named_parameters())
    assert all(tensor.equal(weights[f"export.{name}"]) for name, tensor in policy.items())
    if kind == "own":
        export(tmp_path, tmp_path / "critic", part="critic")
        critic = dict(AutoModel.from_pretrained(tmp_path / "critic").named_parameters())
        assert all(tensor.equal(weights[f"critic.{name}"]) for name, tensor in critic.items())
        head = load_file(tmp_path / "critic" / "value_head.safetensors")
        assert head["weight"].equal(weights["critic.value_head.weight"]) and head["weight"].any()
