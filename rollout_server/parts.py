"""An answer that comes in parts: how parts are joined, and continued elsewhere."""

import msgspec

from rl_async.messages import VersionRun
from rl_async.rollout_server.api import GenerateRequest, GenerateResult

NOTHING = GenerateResult(token_ids=[], logprobs=[], versions=[], finish_reason="abort")


def join(first: GenerateResult, second: GenerateResult) -> GenerateResult:
    """``second`` goes on where ``first`` was left; how it ended is how the whole ended."""
    offset = len(first.token_ids)
    runs = list(first.versions)
    for run in second.versions:
        if runs and runs[-1].version == run.version:
            runs[-1] = VersionRun(run.version, runs[-1].start, run.end + offset)
        else:
            runs.append(VersionRun(run.version, run.start + offset, run.end + offset))
    return GenerateResult(
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        versions=runs,
        finish_reason=second.finish_reason,
    )


def continuation(request: GenerateRequest, done: GenerateResult) -> GenerateRequest:
    """The request for what is still missing. A prompt of another length makes other caches, so the id differs too."""
    if not done.token_ids:
        return request
    return msgspec.structs.replace(
        request,
        request_id=f"{request.request_id}+{len(done.token_ids)}",
        token_ids=request.token_ids + done.token_ids,
        max_tokens=request.max_tokens - len(done.token_ids),
    )
