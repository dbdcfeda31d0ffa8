"""Bodies of SGLang's routes (0.5.23), as far as this project uses them. ``sglang.py`` sends and reads them."""

from typing import ClassVar

import msgspec

from rl_async.rollout_server.api import FinishReason


class SamplingBody(msgspec.Struct):
    """Every key that changes what is sampled, each one explicitly, so that no default of the server's counts.

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
    no_stop_trim: bool = True  # the stop token was sampled too
    n: int = 1


class GenerateBody(msgspec.Struct):
    """``POST /generate``."""

    rid: str
    input_ids: list[int]
    sampling_params: SamplingBody
    return_logprob: bool = True
    logprob_start_len: int = -1  # of sampled tokens only
    stream: bool = False


class GroupBody(msgspec.Struct):
    """``POST /init_weights_update_group``."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


class UpdateBody(msgspec.Struct):
    """``POST /update_weights_from_distributed``: one broadcast of uint8, tensors one after the other.

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
    """``POST /update_weight_version``, which by itself would abort all requests."""

    new_version: str
    abort_all_requests: bool = False


class Outcome(msgspec.Struct):
    """Answer of the control routes."""

    success: bool
    message: str = ""


class ModelInfo(msgspec.Struct):
    """``GET /model_info``."""

    weight_version: str | None = None


class RankChecksums(msgspec.Struct):
    """Of one worker: a checksum by the name of each tensor."""

    checksums: dict[str, str]


class Checksums(msgspec.Struct):
    """``POST /weights_checker``."""

    ranks: list[RankChecksums]


class Span(msgspec.Struct):
    """Sampled tokens from ``start`` to ``end`` came from weights of this name."""

    version: str
    start: int
    end: int


class Stopped(msgspec.Struct, tag_field="type", tag="stop"):
    """A stop token was sampled."""

    name: ClassVar[FinishReason] = "stop"


class Full(msgspec.Struct, tag_field="type", tag="length"):
    """``max_new_tokens`` were sampled, or the context is full."""

    name: ClassVar[FinishReason] = "length"


class Aborted(msgspec.Struct, tag_field="type", tag="abort"):
    """Given up; with a status, because of an error."""

    message: str | None = None
    status_code: int | None = None
    name: ClassVar[FinishReason] = "abort"


class MetaInfo(msgspec.Struct):
    """What came with the sampled tokens."""

    finish_reason: Stopped | Full | Aborted
    output_token_logprobs: list[tuple[float, int, str | None]] | None = None  # log-probability, token, its text
    weight_versions: list[Span] | None = None


class Answer(msgspec.Struct):
    """Answer of ``POST /generate``."""

    output_ids: list[int]
    meta_info: MetaInfo


class Queues(msgspec.Struct):
    """Of a scheduler's load."""

    retracted: int = 0


class Load(msgspec.Struct):
    """One scheduler's load, ``LoadSnapshot`` in ``sglang/srt/managers/load_snapshot.py``."""

    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float  # share of the KV cache, 0 to 1
    queues: Queues | None = None


class Loads(msgspec.Struct):
    """Answer of ``GET /v1/loads``."""

    loads: list[Load]
