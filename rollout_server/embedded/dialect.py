"""Bodies of vLLM's dialect as the embedded engine accepts and answers them. Unknown sampling keys are refused."""

import msgspec

from rl_async.messages import Sampling
from rl_async.rollout_server.embedded.sequence import Sequence

REQUEST_PREFIX = "generate-tokens-"


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    """``sampling_params`` of a generate request."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = 0
    n: int = 1


class GenerateBody(msgspec.Struct):
    """``POST /inference/v1/generate``."""

    token_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    request_id: str = ""
    stream: bool = False

    def sampling(self) -> Sampling:
        """The distribution asked for. Raises ValueError for values out of range."""
        p = self.sampling_params
        if p.temperature < 0 or not 0 < p.top_p <= 1 or p.top_k < -1 or not 0 <= p.min_p <= 1:
            raise ValueError("sampling_params: temperature >= 0, 0 < top_p <= 1, top_k >= -1, 0 <= min_p <= 1")
        if p.n != 1 or p.logprobs not in (0, None):
            raise ValueError("sampling_params: the embedded engine serves n=1 and logprobs=0 (the sampled token's)")
        return Sampling(p.temperature, p.top_p, max(p.top_k, 0), p.min_p)


class AbortBody(msgspec.Struct):
    """``POST /abort_requests``; no ids: all requests."""

    request_ids: list[str] | None = None


class CheckerBody(msgspec.Struct):
    """``POST /weight_checker``: ``checksum``, or ``compare`` with a baseline."""

    action: str
    baseline: dict[str, str] = {}


def choice(sequence: Sequence, start: int = 0) -> dict[str, object]:
    """One entry of ``choices``: the samples from ``start`` on."""
    tokens, logprobs = sequence.sampled[start:], sequence.logprobs[start:]
    return {
        "index": 0,
        "finish_reason": sequence.finish_reason,
        "stop_reason": tokens[-1] if sequence.finish_reason == "stop" else None,
        "token_ids": tokens,
        "logprobs": {"content": [{"token_id": t, "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]},
        "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in sequence.spans()],
    }


def answer(sequence: Sequence, model: str) -> dict[str, object]:
    """The whole answer of a generate request."""
    prompt, sampled = sequence.prompt_length, len(sequence.logprobs)
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return {"request_id": sequence.request_id, "model": model, "usage": usage, "choices": [choice(sequence)]}
