"""The memory that a trainer rank needs to load, resume, save and export a model, on 1, 2 and 4 ranks.

    python -m benchmarks.loading [--ranks 2 4] [--layers 10] [--hidden 768] [--words 32000] [--megatron] [--json FILE]

A Qwen3 with random weights, saved in bfloat16 in two files, is loaded by processes of their own, each rank of one
thread, in these ways:

whole     every rank reads the whole model with Transformers' ``from_pretrained`` and then shards it
shards    ``Fsdp2Backend`` of a reference: every rank reads its part
resume    ``Fsdp2Backend`` that trains and reads a checkpoint with AdamW's two moments
save      ``Fsdp2Backend`` writes such a checkpoint, without the weights of the Hugging Face folder
megatron  ``MegatronBackend``, two tensor-parallel ranks if there are several: ``-build`` makes one that trains, which
          reads the model, ``-resume`` reads the checkpoint into it, and ``-save`` writes one
export    one process assembles the checkpoint's weights as one file, in float32

Of each rank the peaks above what it had before, of the worst rank:

anonymous  RssAnon of /proc/self/status, read every millisecond: memory of its own, that of a device on a GPU
resident   VmHWM: with the pages of mapped files, which the kernel takes back when memory is short and shares between
           the ranks of a machine

They are compared with what the rank needs plus one layer of the model, in float32: its part of the weights, with
Megatron-Core the sums of gradients too; resuming, AdamW's two moments; saving, a copy of weights and moments.
Megatron-Core's data-parallel ranks each hold the same weights and sums, and divide the moments and what they save. An
export needs its largest tensor, which is the vocabulary's.
"""

import argparse
import ctypes
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.processes.command_line import save
from benchmarks.processes.ranks import run_ranks
from benchmarks.processes.trainer_arms import resident
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.backend import Backend
from rl_async.trainer.export import write_model
from rl_async.trainer.fsdp2 import Fsdp2Backend, mesh_of, shard
from rl_async.trainer.model import Headed
from rl_async.trainer.pretrained import own_part

DEADLINE_S = 600
SAMPLED_S = 0.001
MODEL, CHECKPOINT = "model", "checkpoint"


def make(folder: Path, layers: int, hidden: int, words: int) -> tuple[int, int, int]:
    """Save the model; returns the parameters of all of it, of one layer, and of the vocabulary."""
    config = Qwen3Config(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=hidden * 10 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(folder / MODEL, max_shard_size=f"{model.num_parameters() * 2 // 2**20 * 2 // 3}MB")
    assert len(list((folder / MODEL).glob("*.safetensors"))) > 1
    word = Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
    PreTrainedTokenizerFast(tokenizer_object=word).save_pretrained(folder / MODEL)  # checkpoints have a copy
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    return model.num_parameters(), layer, model.lm_head.weight.numel()


@contextmanager
def peaks(found: list[int]) -> Iterator[None]:
    """Append to ``found`` by how many bytes the peaks rose meanwhile: of anonymous memory and of the resident set."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    before, whole = resident("RssAnon"), resident("VmRSS")
    peak, done = [before], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLED_S):
            peak[0] = max(peak[0], resident("RssAnon"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    found += [max(peak[0], resident("RssAnon")) - before, resident("VmHWM") - whole]


def load_whole(folder: Path, found: list[int]) -> int:
    with peaks(found):
        model = AutoModelForCausalLM.from_pretrained(
            folder / MODEL, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
        spread = shard(Headed(model, "policy"), mesh_of("cpu", dist.get_world_size(), 1, DEADLINE_S), torch.float32)
    return sum(own_part(parameter)[0].nbytes for parameter in spread.parameters())


def load_shards(folder: Path, found: list[int]) -> int:
    with peaks(found):
        backend = Fsdp2Backend(str(folder / MODEL), "float32", "cpu", None)
    return part_of(backend)


def resume(folder: Path, found: list[int]) -> int:
    with peaks(found):
        backend = fsdp2(folder)
        backend.load(folder / CHECKPOINT)
    return 3 * part_of(backend)


def save_shards(folder: Path, found: list[int]) -> int:
    backend = fsdp2(folder)
    backend.load(folder / CHECKPOINT)
    write(backend, folder, found)
    return 3 * part_of(backend)


def build_megatron(folder: Path, found: list[int]) -> int:
    with peaks(found):
        backend = megatron(folder)
    return 2 * part_of(backend)


def resume_megatron(folder: Path, found: list[int]) -> int:
    backend = megatron(folder)
    with peaks(found):
        backend.load(folder / CHECKPOINT)
    return 2 * part_of(backend) // backend.data_parallel.size


def save_megatron(folder: Path, found: list[int]) -> int:
    backend = megatron(folder)
    backend.load(folder / CHECKPOINT)
    write(backend, folder, found)
    return 3 * part_of(backend) // backend.data_parallel.size


ARMS: dict[str, Callable[[Path, list[int]], int]] = {  # measure, and return the bytes that the rank needs
    "whole": load_whole,
    "shards": load_shards,
    "resume": resume,
    "save": save_shards,
    "megatron-build": build_megatron,
    "megatron-resume": resume_megatron,
    "megatron-save": save_megatron,
}


def fsdp2(folder: Path) -> Fsdp2Backend:
    return Fsdp2Backend(str(folder / MODEL), "float32", "cpu", TrainerConfig(checkpoint_hf=False))


def megatron(folder: Path) -> Backend:
    """Two tensor-parallel ranks if there are several; the rest are data-parallel."""
    from rl_async.trainer.megatron.backend import MegatronBackend

    tensor = min(2, dist.get_world_size())
    config = TrainerConfig(backend="megatron", tensor_parallel=tensor, checkpoint_hf=False)
    return MegatronBackend(str(folder / MODEL), "float32", "cpu", config)


def part_of(backend: Backend) -> int:
    """The bytes of the weights that this rank holds."""
    return sum(part.nbytes for part in backend.sharded_weights().held.values())


def write(backend: Backend, folder: Path, found: list[int]) -> None:
    """Save once unmeasured, so that what is imported and mapped for it is there, and once measured."""
    for number, kept in enumerate(([], found)):
        with peaks(kept):
            backend.save(folder / f"saved-{dist.get_world_size()}-{number}")


def measure(arm: str, folder: Path) -> None:
    """One of some ranks: prints both peaks and the bytes that it needs."""
    found: list[int] = []
    if arm == "export":
        target = folder / "exported.safetensors"
        with peaks(found):
            write_model(folder / CHECKPOINT, target)
        target.unlink()
        print(json.dumps([*found, 0]))
        return
    dist.init_process_group("gloo")
    mesh_of("cpu", dist.get_world_size(), 1, DEADLINE_S)
    needed = ARMS[arm](folder, found)
    print(json.dumps([*found, needed]))
    dist.destroy_process_group()


def write_checkpoint(folder: Path) -> None:
    """One rank: a checkpoint with moments, as after a step."""
    dist.init_process_group("gloo")
    backend = fsdp2(folder)
    assert backend.optimizer is not None
    for parameter in backend.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    backend.optimizer.step()
    backend.save(folder / CHECKPOINT)
    dist.destroy_process_group()


def run(arm: str, folder: Path, ranks: int) -> list[int]:
    """The largest of the ranks' peaks, and of what they need."""
    command = [sys.executable, "-m", "benchmarks.loading", "--worker", arm, str(folder)]
    told = [json.loads(printed.splitlines()[-1]) for printed in run_ranks(command, ranks, timeout_s=DEADLINE_S)]
    for saved in folder.glob("saved-*"):
        shutil.rmtree(saved)
    return [max(column) for column in zip(*told, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a trainer rank until it can begin.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--words", type=int, default=32_000)
    parser.add_argument(
        "--megatron", action="store_true", help="also the arms of Megatron-Core, which must be installed"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--worker", nargs=2, metavar=("ARM", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.worker:
        arm, folder = arguments.worker
        write_checkpoint(Path(folder)) if arm == CHECKPOINT else measure(arm, Path(folder))
        return
    results: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        parameters, layer, vocabulary = (
            4 * n for n in make(folder, arguments.layers, arguments.hidden, arguments.words)
        )
        print(f"model {mib(parameters)} MiB in float32, a layer {mib(layer)}, the vocabulary {mib(vocabulary)}")
        command = [sys.executable, "-m", "benchmarks.loading", "--worker", CHECKPOINT, str(folder)]
        run_ranks(command, 1, timeout_s=DEADLINE_S)
        print(
            "ranks   arm               needs + layer   anonymous   resident   anonymous / allowed   resident / allowed"
        )
        arms = [arm for arm in ARMS if arguments.megatron or not arm.startswith("megatron")]
        for ranks in arguments.ranks:
            for arm in arms:
                anonymous, mapped, needed = run(arm, folder, ranks)
                results |= report(f"{arm}_{ranks}", needed + layer, anonymous, mapped)
        anonymous, mapped, _ = run("export", folder, 1)
        results |= report("export_1", vocabulary, anonymous, mapped)
    save(results, arguments.json)


def report(name: str, allowed: int, anonymous: int, mapped: int) -> dict[str, float | None]:
    arm, _, ranks = name.partition("_")
    print(
        f"{ranks:>5}   {arm:<16}  {mib(allowed):>13}   {mib(anonymous):>9}   {mib(mapped):>8}   "
        f"{anonymous / allowed:>19.2f}   {mapped / allowed:>18.2f}",
        flush=True,
    )
    return {f"{name}_anonymous": anonymous / allowed, f"{name}_resident": mapped / allowed}


def mib(count: int) -> str:
    return f"{count / 2**20:,.0f}"


if __name__ == "__main__":
    main()
