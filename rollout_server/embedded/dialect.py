"""Bodies of vLLM's dialect, as the embedded engine accepts and answers them. Unknown sampling keys are refused."""

import base64
import io
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from rl_async.messages import Sampling
from rl_async.rollout_server.embedded.sequence import Sequence


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """What the answer must be: ``json`` is a JSON schema, as text."""

    json: str


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    """``sampling_params`` of a generate request; values out of range are refused before they reach the engine."""

    max_tokens: int = 16
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] = 0  # 0 or -1: off
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: Literal[0] | None = 0  # of the sampled token only
    n: Annotated[int, Meta(ge=1)] = 1  # samples of the prompt
    stream_interval: Annotated[int, Meta(ge=1)] = 1  # tokens per part of a stream
    structured_outputs: StructuredOutputs | None = None
    routed_experts_prompt_start: Annotated[int, Meta(ge=0)] = 0  # the first token whose experts the answer names


class GenerateBody(msgspec.Struct):
    """Request of ``POST /inference/v1/generate``, for ``n`` samples of one prompt."""

    token_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    request_id: str = ""
    stream: bool = False

    def sampling(self) -> Sampling:
        """Return the sampling parameters that fix the distribution of each token."""
        p = self.sampling_params
        return Sampling(p.temperature, p.top_p, max(p.top_k, 0), p.min_p)


class AbortBody(msgspec.Struct):
    """Request of ``POST /abort_requests``; without ids, all requests are aborted."""

    request_ids: list[str] | None = None


class CheckerBody(msgspec.Struct):
    """Request of ``POST /weight_checker``, of whose actions only this one is served."""

    action: Literal["checksum"]


def stuck(sequences: Iterable[Sequence]) -> str:
    """Say why one of the sequences cannot go on within its schema; empty if all can."""
    return next((f"structured_outputs: {sequence.stuck}" for sequence in sequences if sequence.stuck), "")


def delta(sequence: Sequence, start: int, end: int) -> dict[str, object]:
    """Build an entry of ``choices`` for a sequence that still runs: its samples from ``start`` to ``end`` (exclusive).

    The engine's thread may be appending samples meanwhile, so nothing beyond ``end`` is read.
    """
    tokens, logprobs = sequence.sampled[start:end], sequence.logprobs[start:end]
    return {
        "index": sequence.index,
        "finish_reason": None,
        "token_ids": tokens,
        "logprobs": {"content": [{"token_id": t, "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]},
        "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in sequence.spans(end)],
    }


def choice(sequence: Sequence, start: int = 0) -> dict[str, object]:
    """Build an entry of ``choices`` for a finished sequence: its samples from ``start`` on, and its finish reason."""
    return delta(sequence, start, len(sequence.logprobs)) | {
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.tokens[-1] if sequence.finish_reason == "stop" else None,
        "routed_experts": _routes(sequence),
    }


def _routes(sequence: Sequence) -> str | None:
    """Return the experts of the tokens from ``routed_from`` on as vLLM does, an .npy file in base64, if any."""
    if sequence.routes is None:
        return None
    experts = sequence.routes[sequence.routed_from :].cpu().numpy()
    file = io.BytesIO()
    np.save(file, experts if experts.dtype == np.uint8 else experts.astype(np.uint16), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def answer(sequences: list[Sequence], model: str) -> dict[str, object]:
    """Build the answer to a generate request that is not streamed."""
    prompt, sampled = sequences[0].prompt_length, sum(len(sequence.logprobs) for sequence in sequences)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": sequences[0].cached_tokens},
    }
    choices = [choice(sequence) for sequence in sequences]
    return {"request_id": sequences[0].request_id, "model": model, "usage": usage, "choices": choices}
