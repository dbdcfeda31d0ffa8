"""``rl-async engine verify``: checks that an engine samples from a given model.

Compares the log-probabilities that the engine reports for its samples with those of a plain forward pass over the same
tokens. The temperature is not 1, so that log-probabilities taken before the temperature are noticed. Every other prompt
begins with an image if the model reads images, except for SGLang, which refuses them.
"""

import asyncio
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Drawing
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rl_async.concurrency import gather_or_cancel
from rl_async.configs.engines import EngineKind
from rl_async.errors import EngineError, UserError
from rl_async.messages import Sampling, Version
from rl_async.pictures import PictureProcessor
from rl_async.rollout_server.api import GenerateRequest, GenerateResult, Image
from rl_async.rollout_server.embedded.core import place_images
from rl_async.rollout_server.pool import connect

TEMPERATURE = 0.7
PROMPT_TOKENS = (1, 4, 16, 31)
SAMPLED_TOKENS = 32
CONCURRENT = 16
# Pixels of a side of an image.
SIDE = 96
# The argument by which a model knows the tokens of images.
KINDS = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids", "qwen3_vl": "mm_token_type_ids"}


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
    pictures = PictureProcessor.load(str(folder))
    loader = AutoModelForCausalLM if pictures is None else AutoModelForImageTextToText
    try:
        model: Any = loader.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        ).eval()
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"--model: cannot load a causal LM from {folder}: {reason}") from error
    vocabulary = int(model.config.get_text_config().vocab_size)
    requests = make_requests(prompts, vocabulary, None if kind == "sglang" else pictures)
    try:
        answers = asyncio.run(_ask(kind, url, token, requests))
    except EngineError as error:
        raise UserError(f"{url}: {error}") from error
    scaled: list[torch.Tensor] = []
    raw: list[torch.Tensor] = []
    for request, answer in zip(requests, answers, strict=True):
        reported = torch.tensor(answer.logprobs, dtype=torch.float32)
        logits = _logits(model, request, answer, pictures)
        sampled = torch.tensor(answer.token_ids)[:, None]
        for temperature, differences in ((TEMPERATURE, scaled), (1.0, raw)):
            found = (logits / temperature).log_softmax(-1).gather(1, sampled)[:, 0]
            differences.append((found - reported).abs())
    off = torch.cat(scaled)
    return Agreement(
        tokens=len(off),
        largest=off.max().item(),
        mean=off.mean().item(),
        raw_largest=torch.cat(raw).max().item(),
        tolerance=tolerance,
    )


def make_requests(count: int, vocabulary: int, pictures: PictureProcessor | None) -> list[GenerateRequest]:
    """Draw prompts of random tokens, of several lengths, with a fixed seed; if ``pictures``, half of them with an
    image."""
    draw = torch.Generator().manual_seed(0)
    requests = []
    for number in range(count):
        length = PROMPT_TOKENS[number // (1 if pictures is None else 2) % len(PROMPT_TOKENS)]
        ids: list[int] = torch.randint(vocabulary, (length,), generator=draw).tolist()
        images: list[Image] = []
        stops: list[int] = []
        if pictures is not None:
            # Transformers would take an image token without an image for part of one.
            stops = [pictures.image_token]
            ids = [token for token in ids if token not in (pictures.mark, pictures.image_token)] or [0]
        if pictures is not None and number % 2:
            data = _drawing(draw)
            ids, (position,) = pictures.expand([pictures.mark, *ids], [data])
            images = [Image.of(data, "image/png", position)]
        requests.append(
            GenerateRequest(
                request_id=f"verify-{number}",
                token_ids=ids,
                images=images,
                sampling=Sampling(temperature=TEMPERATURE),
                max_tokens=SAMPLED_TOKENS,
                stop_token_ids=stops,
            )
        )
    return requests


def _drawing(draw: torch.Generator) -> bytes:
    file = io.BytesIO()
    colours = torch.randint(256, (SIDE, SIDE, 3), generator=draw, dtype=torch.uint8)
    Drawing.fromarray(colours.numpy()).save(file, "PNG")
    return file.getvalue()


@torch.inference_mode()
def _logits(model: Any, request: GenerateRequest, answer: GenerateResult, pictures: PictureProcessor | None) -> Tensor:
    """Compute the logits of the sampled tokens with a plain forward pass, float32 [sampled, vocabulary]."""
    ids = torch.tensor(request.token_ids + answer.token_ids)[None, :-1]
    inputs: dict[str, Tensor] = {}
    if placed := place_images(pictures, request.token_ids, request.images):
        assert pictures is not None
        arguments = pictures.arguments([image.picture for image in placed])
        inputs = {name: torch.from_numpy(array) for name, array in arguments.items()}
        kinds = torch.zeros_like(ids)
        for image in placed:
            kinds[0, image.features] = 1
        if model.config.model_type in KINDS:
            inputs[KINDS[model.config.model_type]] = kinds
    return model(ids, **inputs).logits[0, len(request.token_ids) - 1 :].float()


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
