"""How far are engine and trainer apart with a mixture of experts, and how far if the trainer replays its routers?

The embedded engine samples with a copy of the model that differs as engines do: weights in bfloat16 or rounded to 8
bits, routers that are a little off. The trainer computes the log-probabilities of the same tokens in float32, with and
without the record of the experts that the engine chose. Prompts are random tokens.

    python -m benchmarks.router_replay [MODEL] [--json FILE]

MODEL is a folder with a Qwen3-MoE; without it, the model that `rl-async launch --config calculator-moe` prepares, which
is made if it is missing.
"""

import copy
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.processes.command_line import parser, save
from rl_async.configs.load import load_config
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.launcher.plan.artifacts import needs_preparation
from rl_async.launcher.runs.prepare import prepare
from rl_async.messages import Sampling, Trajectory, Version, VersionRun
from rl_async.rollout_server.embedded.core import EngineCore, Sequence
from rl_async.rollout_server.embedded.engine_thread import quantize_layers
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import collate

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 4, 24, 80
NOISE = 0.02  # of the standard deviation of a router's weights


class Distance(NamedTuple):
    """How far the trainer's log-probabilities d = log pi - log mu are from the engine's."""

    mean: float  # |d|
    largest: float  # |d|
    k3: float  # mean of exp(d) - 1 - d, an estimate of KL(mu || pi)
    ess: float  # effective share of the rows, weighed by the products of their tokens' ratios
    agreement: float | None  # share of (token, layer) pairs whose router chooses as the engine's did


def sampled(model: nn.Module, vocab: int, seed: int = 0) -> list[Trajectory]:
    """Rows that an engine with ``model`` samples."""
    core = EngineCore(model, max_batch=16, max_length=PROMPT_TOKENS + NEW_TOKENS, record_routes=True)
    draw = random.Random(seed)
    prompts = [[draw.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    todo = [
        Sequence(
            request_id="",
            tokens=list(prompts[number // SAMPLES]),
            sampling=Sampling(),
            max_tokens=NEW_TOKENS,
            stop_token_ids=frozenset(),
            seed=seed + number,
            deliver=lambda _: None,
        )
        for number in range(PROMPTS * SAMPLES)
    ]
    for sequence in todo:
        core.add(sequence)
    while core.unfinished:
        core.step()
    return [row(number, sequence) for number, sequence in enumerate(todo)]


def row(number: int, sequence: Sequence) -> Trajectory:
    """A sequence as the row that is trained."""
    assert sequence.routes is not None
    length, prompt = len(sequence.tokens), sequence.prompt_length
    return Trajectory(
        task_id="",
        group_id=number // SAMPLES,
        sample=number % SAMPLES,
        attempt=0,
        episode_id=str(number),
        token_ids=np.array(sequence.tokens, np.int32),
        loss_mask=np.arange(length) >= prompt,
        logprobs=np.array([0.0] * prompt + sequence.logprobs, np.float32),
        versions=[VersionRun(Version(), 0, length - prompt)],
        sampling=sequence.sampling,
        reward=0.0,
        routed_experts=sequence.routes.numpy(),
    )


def distance(backend: Fsdp2Backend, rows: list[Trajectory], *, replay: bool) -> Distance:
    """Compare the backend's log-probabilities with those that the rows have."""
    batch = collate(rows, device="cpu", share_prefixes=True, replay_routers=replay)
    outputs = backend.forward(batch)
    assert outputs.logprobs is not None
    behaviour = torch.zeros_like(outputs.logprobs)
    for number, one in enumerate(rows):
        behaviour[number, : len(one.logprobs) - 1] = torch.from_numpy(one.logprobs[1:])
    apart = torch.where(batch.mask, outputs.logprobs - behaviour, 0.0).double()
    tokens, products = apart[batch.mask], apart.sum(1).exp()
    return Distance(
        mean=tokens.abs().mean().item(),
        largest=tokens.abs().max().item(),
        k3=(tokens.exp() - 1 - tokens).mean().item(),
        ess=(products.sum() ** 2 / (len(products) * products.square().sum())).item(),
        agreement=None if outputs.agreement is None else outputs.agreement[batch.mask].mean().item(),
    )


def perturbed(model: Any) -> nn.Module:
    """The model with noise on its routers' weights."""
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight
            weight.add_(NOISE * weight.std() * torch.randn_like(weight))
    return model


def rounded(model: Any, quantization: str) -> nn.Module:
    """The model with the layers that an engine has with this ``rollout.quantization``."""
    quantize_layers(model, quantization)
    return model


ENGINES: Mapping[str, Callable[[Any], nn.Module]] = {
    "float32, the same weights": lambda model: model,
    "bfloat16": lambda model: model.bfloat16(),
    "float32, layers in int8": partial(rounded, quantization="int8"),
    "float32, layers in fp8": partial(rounded, quantization="fp8"),
    f"float32, noise of {NOISE:.0%} on the routers": perturbed,
}


def prepared() -> str:
    """The folder of calculator-moe's model, which is made if it is missing."""
    config = load_config("calculator-moe")
    if needs_preparation(config):
        prepare(config, print)
    return config.model.path


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model", nargs="?")
    given = arguments.parse_args()
    path = given.model or prepared()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    backend = Fsdp2Backend(path, "float32", "cpu", TrainerConfig())
    found = {}
    print("| engine | replay | mean of d | largest | k3 | ESS of rows | agreement |\n|---|---|---|---|---|---|---|")
    for name, change in ENGINES.items():
        rows = sampled(change(copy.deepcopy(model)), model.config.vocab_size)
        for replay in (False, True):
            one = found[f"{name}, {'with' if replay else 'without'} replay"] = distance(backend, rows, replay=replay)
            agreement = "" if one.agreement is None else f"{one.agreement:.4f}"
            print(
                f"| {name} | {'yes' if replay else 'no'} | {one.mean:.2g} | {one.largest:.2g} | {one.k3:.2g} "
                f"| {one.ess:.3f} | {agreement} |"
            )
    dist.destroy_process_group()
    save({f"{name}, {what}": value for name, one in found.items() for what, value in one._asdict().items()}, given.json)


if __name__ == "__main__":
    main()
