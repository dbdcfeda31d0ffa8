"""Bodies of SGLang's routes (0.5.23), as far as ``client.py`` uses them."""

from typing import ClassVar

import msgspec

from rl_async.rollout_server.api import FinishReason


class SamplingBody(msgspec.Struct):
    """Every key that changes what is sampled, always sent, so that no default of the server applies.

    SGLang refuses unknown keys here. ``ignore_eos`` switches off ``stop_token_ids`` as well.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop_token_ids: list[int]
    ignore_eos: bool
    sampling_seed: int | None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    no_stop_trim: bool = True  # the answer includes the stop token
    n: int = 1


class SampleBody(msgspec.Struct):
    """Request of ``POST /generate``, one sample of one prompt."""

    rid: str
    input_ids: list[int]
    sampling_params: SamplingBody
    return_logprob: bool = True
    logprob_start_len: int = -1  # of sampled tokens only
    stream: bool = False


class GroupBody(msgspec.Struct):
    """Request of ``POST /init_weights_update_group``, the torch process group that weights arrive by."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


class BucketBody(msgspec.Struct):
    """Request of ``POST /update_weights_from_distributed``: one broadcast of uint8, tensors one after the other.

    The cache is flushed once, after the last bucket, and no request is aborted.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    load_format: str = "flattened_bucket"
    flush_cache: bool = False
    abort_all_requests: bool = False


class VersionBody(msgspec.Struct):
    """Request of ``POST /update_weight_version``, whose default is to abort all requests."""

    new_version: str
    abort_all_requests: bool = False


class ControlReply(msgspec.Struct):
    """Reply of the control routes. A refusal has status 200 too, with ``success`` false."""

    success: bool
    message: str = ""


class ModelInfo(msgspec.Struct):
    """Reply of ``GET /model_info``; unknown fields are ignored."""

    weight_version: str | None = None


class ServerInfo(msgspec.Struct):
    """Reply of ``GET /server_info``; unknown fields are ignored."""

    tp_size: int


class RankChecksums(msgspec.Struct):
    """Checksums of one worker's tensors, by name."""

    checksums: dict[str, str]


class ChecksumReply(msgspec.Struct):
    """Reply of ``POST /weights_checker``, one entry per worker."""

    ranks: list[RankChecksums]


class WeightSpan(msgspec.Struct):
    """The weights named ``version`` sampled the tokens from ``start`` to ``end`` (exclusive)."""

    version: str
    start: int
    end: int


class Stopped(msgspec.Struct, tag_field="type", tag="stop"):
    """Finish reason: the last token is a stop token."""

    name: ClassVar[FinishReason] = "stop"


class Full(msgspec.Struct, tag_field="type", tag="length"):
    """Finish reason: ``max_new_tokens`` were sampled, or the context is full."""

    name: ClassVar[FinishReason] = "length"


class Aborted(msgspec.Struct, tag_field="type", tag="abort"):
    """Finish reason: the request was aborted, because of an error if there is a status."""

    message: str | None = None
    status_code: int | None = None
    name: ClassVar[FinishReason] = "abort"


class MetaInfo(msgspec.Struct):
    """Finish reason, log-probabilities and weight versions of the sampled tokens."""

    finish_reason: Stopped | Full | Aborted
    output_token_logprobs: list[tuple[float, int, str | None]] | None = None  # log-probability, token, its text
    weight_versions: list[WeightSpan] | None = None


class SampleReply(msgspec.Struct):
    """Reply of ``POST /generate``, the sampled tokens alone."""

    output_ids: list[int]
    meta_info: MetaInfo


class QueueCounts(msgspec.Struct):
    """Requests that a scheduler has put back into its queue (retracted)."""

    retracted: int = 0


class SchedulerLoad(msgspec.Struct):
    """Load of one scheduler: ``LoadSnapshot`` in ``sglang/srt/managers/load_snapshot.py``."""

    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float  # share of the KV cache, 0 to 1
    queues: QueueCounts | None = None


class LoadReply(msgspec.Struct):
    """Reply of ``GET /v1/loads``, one entry per scheduler."""

    loads: list[SchedulerLoad]
