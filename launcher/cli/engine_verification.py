"""``rl-async engine verify``: checks that an engine samples from a given model.

Compares the log-probabilities that the engine reports for its samples with those of a plain forward pass over the same
tokens. The temperature is not 1, so that log-probabilities taken before the temperature are noticed.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_async.concurrency import gather_or_cancel
from rl_async.configs.engines import EngineKind
from rl_async.errors import EngineError, UserError
from rl_async.messages import Sampling, Version
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.rollout_server.pool import connect

TEMPERATURE = 0.7
PROMPT_TOKENS = (1, 4, 16, 31)
SAMPLED_TOKENS = 32
CONCURRENT = 16


@dataclass(frozen=True)
class Agreement:
    """|log pi of the engine - log pi of the forward pass| over the sampled tokens.

    ``raw_largest`` is the largest difference if the forward pass does not apply the temperature.
    """

    tokens: int
    largest: float
    mean: float
    raw_largest: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.largest <= self.tolerance

    def text(self) -> str:
        """Format the comparison, and the verdict with its most likely reason."""
        lines = [
            f"tokens compared          {self.tokens}, sampled at temperature {TEMPERATURE}",
            f"log-probability, largest {self.largest:.2e}   mean {self.mean:.2e}   (tolerance {self.tolerance:.0e})",
        ]
        if self.ok:
            return "\n".join([*lines, "verdict: the engine samples from this model"])
        if self.raw_largest <= self.tolerance:
            why = (
                "it reports log-probabilities before the temperature; start vLLM with --logprobs-mode "
                "processed_logprobs"
            )
        else:
            why = "other weights, another model, a lower precision (then raise --tolerance), or a fault in the engine"
        return "\n".join([*lines, f"verdict: the engine does NOT agree with this model: {why}"])


def verify(
    url: str, folder: Path, prompts: int, tolerance: float, kind: EngineKind = "vllm", token: str = ""
) -> Agreement:
    """Compare the engine of this kind at ``url`` with the model in ``folder`` on this many random prompts.

    Raises UserError if the model cannot be loaded or the engine does not answer.
    """
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        ).eval()
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"--model: cannot load a causal LM from {folder}: {reason}") from error
    requests = make_requests(prompts, int(model.config.vocab_size))
    try:
        answers = asyncio.run(_ask(kind, url, token, requests))
    except EngineError as error:
        raise UserError(f"{url}: {error}") from error
    scaled, raw = [], []
    for request, answer in zip(requests, answers, strict=True):
        reported = torch.tensor(answer.logprobs, dtype=torch.float32)
        scaled.append((logprobs(model, request, answer, TEMPERATURE) - reported).abs())
        raw.append((logprobs(model, request, answer, 1.0) - reported).abs())
    differences = torch.cat(scaled)
    return Agreement(
        tokens=len(differences),
        largest=differences.max().item(),
        mean=differences.mean().item(),
        raw_largest=torch.cat(raw).max().item(),
        tolerance=tolerance,
    )


def make_requests(count: int, vocabulary: int) -> list[GenerateRequest]:
    """Draw prompts of random tokens, of several lengths, with a fixed seed."""
    draw = torch.Generator().manual_seed(0)
    return [
        GenerateRequest(
            request_id=f"verify-{number}",
            token_ids=torch.randint(vocabulary, (PROMPT_TOKENS[number % len(PROMPT_TOKENS)],), generator=draw).tolist(),
            sampling=Sampling(temperature=TEMPERATURE),
            max_tokens=SAMPLED_TOKENS,
            stop_token_ids=[],
        )
        for number in range(count)
    ]


@torch.inference_mode()
def logprobs(model: Any, request: GenerateRequest, answer: GenerateResult, temperature: float) -> Tensor:
    """Compute log-probabilities of the sampled tokens with a plain forward pass, float32 [sampled]."""
    ids = torch.tensor(request.token_ids + answer.token_ids)
    start = len(request.token_ids)
    logits = model(ids[None]).logits[0, start - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[start:, None])[:, 0]


async def _ask(kind: EngineKind, url: str, token: str, requests: list[GenerateRequest]) -> list[GenerateResult]:
    # A server may use any version name until it has received weights from this project, so names are not parsed.
    engine = connect(kind, url, read_version=lambda name: Version(), token=token)
    limit = asyncio.Semaphore(CONCURRENT)

    async def ask(request: GenerateRequest) -> GenerateResult:
        async with limit:
            return await engine.generate(request)

    try:
        return await gather_or_cancel(*map(ask, requests))
    finally:
        await engine.close()
