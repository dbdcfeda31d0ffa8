"""Continuous batching around a Transformers causal LM, one iteration at a time, without threads or sockets.

An iteration admits waiting sequences and prefills them in a padded pass, and those with a known prefix in another one;
equal prompts are computed once. Then it decodes all running sequences. Log-probabilities are those of a plain forward
pass, independently of the rest of the batch.

A ``Sequence`` is one sample of one request, from submission to its finish reason. The served models and their attention
are defined before the scheduler: SDPA as Transformers calls it, except that layers with a window and without a mask
attend in blocks.

On a GPU, decode steps over tensors of fixed shapes and addresses are captured once and then replayed (``StaticSteps``).
A step feeds the last token of each row, samples the next ones, and leaves these and their positions where the following
step reads them, so it needs nothing from the host. Rows and keys are padded to powers of two, rows by free slots, so
that few steps have different shapes; beyond a limit those captured steps go that were not used for longest. Random
numbers are drawn before a step, because rows with a seed have generators of their own.

The host launches a step, then reads the results of the previous one. It learns one step late that a row has ended with
a stop token, and drops the surplus token that was sampled meanwhile.

Images in prompts: ``place_images`` checks a request's images against its ids, and ``VisionInputs`` has the decoder's
arguments for a pass over prompts with images. The tower computes an image again whenever a part of it is prefilled, so
that no features of older weights are kept.
"""

import inspect
import itertools
import math
import time
from collections import abc, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl_async import tracing
from rl_async.accelerators import graphs_of
from rl_async.configs.engines import STATIC_KEYS, most_static_steps
from rl_async.errors import DataError, UserError
from rl_async.messages import Sampling
from rl_async.model_files import experts_of, mixers_of
from rl_async.pictures import Picture, PictureProcessor
from rl_async.rollout_server.api import FinishReason, Image
from rl_async.rollout_server.embedded.cache import (
    BLOCK,
    Block,
    Item,
    PrefixCache,
    RouteRecorder,
    SlotCache,
    cache_tokens,
    joined,
    keep_states,
)
from rl_async.rollout_server.embedded.sampler import Matcher, Sampler, restrict
from rl_async.torch_shared import host_buffer, output_logits, to_device, widened, windowed
from rl_async.tracing import Value

# Families of vision-language models whose log-probabilities a test compares with a plain forward pass.
SERVED_WITH_IMAGES = ("gemma3", "idefics3", "qwen2_5_vl", "qwen3_vl", "smolvlm")
# Of these, the ones in which tokens of an image see those behind them.
BIDIRECTIONAL = ("gemma3",)


@dataclass(frozen=True)
class PlacedImage:
    """An image in a prompt. ``features`` are the prompt's indices, ascending, whose embeddings the tower computes."""

    sha256: str
    position: int
    picture: Picture
    features: np.ndarray

    @property
    def end(self) -> int:
        """The index after its last token."""
        return self.position + len(self.picture.tokens)


def place_images(
    processor: PictureProcessor | None, ids: abc.Sequence[int], images: abc.Sequence[Image]
) -> tuple[PlacedImage, ...]:
    """Encode the images of a prompt. Raises DataError unless ``ids`` has each image's tokens at its position, in order.

    Image tokens elsewhere in ``ids`` count as text: the policy may sample them.
    """
    if images and processor is None:
        raise DataError(f"the prompt has {len(images)} images, but this model reads none")
    placed: list[PlacedImage] = []
    starts, end = {image.position for image in images}, 0
    for image in images:
        assert processor is not None
        picture, start = processor.encode(image.data), image.position
        tokens, before, end = picture.tokens, end, start + len(picture.tokens)
        features = start + np.flatnonzero(np.asarray(tokens) == processor.image_token)
        # A newline beside the image may have become one token with the prompt's.
        fits = before <= start and list(ids[start + 1 : end - 1]) == tokens[1:-1] and end <= len(ids)
        longer = end not in starts and list(ids[end : end + 1]) == [processor.image_token]
        if not fits or longer or any(ids[index] != processor.image_token for index in features.tolist()):
            raise DataError(
                f"token_ids lacks the {len(tokens)} tokens of image {image.sha256[:12]} at position {start}; expand "
                "prompts with the processor of the model that the engine serves"
            )
        placed.append(PlacedImage(image.sha256, start, picture, features))
    return tuple(placed)


class VisionInputs:
    """The arguments that a vision-language model's decoder takes for prompts with images."""

    def __init__(self, model: Any, processor: PictureProcessor) -> None:
        self._model, self._embed, self._processor = model.model, model.get_input_embeddings(), processor

    def offset(self, images: abc.Sequence[PlacedImage]) -> int:
        """Return the difference between the rotary position and the index of tokens behind the images."""
        if not images:
            return 0
        end = images[-1].end
        positions = self._rope_positions(images, end + 1)
        return 0 if positions is None else int(positions[0, end]) - end

    def positions(self, prompts: abc.Sequence[tuple[abc.Sequence[PlacedImage], int]], indices: Tensor) -> Tensor:
        """Return the rotary positions of the tokens at ``indices`` [N or 1, T], given images and length of each prompt.

        Their shape is that of ``indices``, or [3, N, T] if the model counts in time, height and width.
        """
        found: list[Tensor] = []
        for (images, length), row in zip(prompts, indices.cpu().expand(len(prompts), -1), strict=True):
            table = self._rope_positions(images, length)
            if table is None:
                return indices
            # Padding only needs valid positions.
            found.append(torch.from_numpy(table)[:, row.clamp(max=length - 1)])
        return torch.stack(found, 1).to(indices.device)

    def _rope_positions(self, images: abc.Sequence[PlacedImage], length: int) -> np.ndarray | None:
        return self._processor.rope_positions(length, [(image.position, image.picture) for image in images])

    def inputs(self, tokens: Tensor, parts: abc.Sequence[tuple[abc.Sequence[PlacedImage], int]]) -> dict[str, Any]:
        """Return the decoder's arguments for ``tokens`` [N, T], given each prompt's images and first index in the pass.

        Images before that index are not computed.
        """
        computed: dict[str, list[Tensor]] = {}
        rows: list[int] = []
        columns: list[int] = []
        found: list[list[Tensor]] = []
        for row, (images, start) in enumerate(parts):
            for image in images:
                known = int(np.searchsorted(image.features, start))
                if known == len(image.features):
                    continue
                if image.sha256 not in computed:
                    computed[image.sha256] = self._features(image, tokens.device)
                found.append([layer[known:] for layer in computed[image.sha256]])
                rows += [row] * (len(image.features) - known)
                columns += (image.features[known:] - start).tolist()
        if not found:
            return {"input_ids": tokens}
        at = torch.tensor(rows, device=tokens.device), torch.tensor(columns, device=tokens.device)
        first, *deeper = (torch.cat(layers) for layers in zip(*found, strict=True))
        embedded = self._embed(tokens)
        embedded[at] = first.to(embedded.dtype)
        if not deeper:
            return {"inputs_embeds": embedded}
        visual = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
        visual[at] = True
        return {"inputs_embeds": embedded, "visual_pos_masks": visual, "deepstack_visual_embeds": deeper}

    def _features(self, image: PlacedImage, device: torch.device) -> list[Tensor]:
        """Compute one image: embeddings [features, hidden], and those that Qwen3-VL adds after its first layers."""
        arguments = self._processor.arguments([image.picture])
        inputs = {name: torch.from_numpy(array).to(device) for name, array in arguments.items()}
        out = self._model.get_image_features(**inputs, return_dict=True)
        (features,) = out.pooler_output
        return [features, *(layer for (layer,) in getattr(out, "deepstack_features", None) or ())]


# Computes logits [rows, V] from the last tokens [rows], their positions [rows] and the number of keys to read.
Compute = Callable[[Tensor, Tensor, int], Tensor]
Step = Callable[[], None]
# Returns a step that does the same without running its Python; the step itself has run once before.
Capture = Callable[[Step], Step]


def uncaptured(step: Step) -> Step:
    """Return the step itself, for devices without graphs."""
    return step


def capture_for(decode: str | None, device: torch.device) -> Capture | None:
    """Return how steps are captured with ``--decode=static``; None for eager steps, which are the default.

    Static steps on devices without graphs run their Python each time.
    """
    if decode != "static":
        return None
    return graphs_of(torch.get_device_module(device)) or uncaptured


class StaticSteps:
    """The rows of a batch of at most ``max_rows``, as tensors on ``device``, and the steps that were captured, at most
    as many as ``most_static_steps`` says for rows of ``max_tokens``.

    ``place`` writes the rows; afterwards only steps and ``compact`` change them.
    """

    def __init__(self, max_rows: int, max_tokens: int, device: torch.device, capture: Capture) -> None:
        self._most = most_static_steps(max_rows, max_tokens)
        self._max_rows, self._device, self._capture = max_rows, device, capture
        self._last = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._positions, self._active = torch.zeros_like(self._last), torch.zeros_like(self._last)
        self._drawn = torch.zeros((max_rows, 1), dtype=torch.float64, device=device)
        # Tokens and log-probabilities side by side: float64 holds both exactly, and one copy takes them to the host.
        self._results = torch.zeros((max_rows, 2), dtype=torch.float64, device=device)
        self._ring = [host_buffer(self._results, device.type) for _ in range(2)]
        self._copied = [torch.get_device_module(device).Event() for _ in range(2)]
        self._turn = 0
        self._view: Tensor | None = None
        # The first sampler of each kind, whose tensors steps read, and the one that was adopted last.
        self._samplers: dict[tuple[int, object], Sampler] = {}
        self._sampler: Sampler | None = None
        self._warm: set[tuple[int, int, object]] = set()
        self._captured: dict[tuple[int, int, object], Step] = {}

    def rows(self, count: int) -> int:
        """Return the number of rows that ``count`` rows are padded to."""
        return min(1 << (count - 1).bit_length(), self._max_rows)

    def holds(self, last: Tensor) -> bool:
        """Whether ``last`` was returned by the latest ``place`` or ``compact``, so the rows are still those."""
        return last is self._view

    def place(self, last: Tensor, positions: list[int]) -> Tensor:
        """Write rows with these last tokens [N] at these positions; return the view of the tokens that steps update."""
        self._last[: len(last)] = last
        self._positions[: len(last)] = to_device(torch.tensor(positions), self._device)
        return self._show(len(last))

    def compact(self, count: int, gaps: list[int], movers: list[int]) -> Tensor:
        """Move the positions of rows ``movers`` to rows ``gaps``, and keep ``count`` rows; return as ``place`` does.

        The caller has moved the last tokens.
        """
        for gap, mover in zip(gaps, movers, strict=True):
            self._positions[gap] = self._positions[mover]
        return self._show(count)

    def _show(self, count: int) -> Tensor:
        # Padding rows stay at position 0 of free slots.
        self._positions[count:] = 0
        self._active.fill_(0)[:count] = 1
        self._view = self._last[:count]
        return self._view

    def forget(self) -> None:
        """Drop captured steps, since tensors that they read have moved or modules have changed."""
        self._warm.clear()
        self._captured.clear()

    def launch(self, sampler: Sampler, longest: int, most: int, compute: Compute) -> Callable[[], list[list[float]]]:
        """Start a step for the placed rows, at most ``longest`` tokens each, of which slots can hold ``most``.

        ``sampler`` is for as many rows as ``rows`` returns. The result waits until the step has ended, and returns the
        token and its log-probability for each row; call it before the step after the next is launched,
        since two buffers alternate.
        """
        assert self._view is not None
        count, view = len(self._view), min(max(STATIC_KEYS, 1 << (longest - 1).bit_length()), most)
        rows = self.rows(count)
        held = self._samplers.setdefault((rows, sampler.kind), sampler)
        if sampler is not self._sampler:
            held.adopt(sampler)
            self._sampler = sampler
        held.draw_numbers(self._drawn[:rows])
        key = rows, view, sampler.kind
        if key in self._captured:
            # The last is the one used last.
            step = self._captured[key] = self._captured.pop(key)
        else:
            step = partial(self._step, rows, view, held, compute)
            if key in self._warm:
                if len(self._captured) == self._most:
                    # It may still run.
                    torch.get_device_module(self._device).synchronize()
                    del self._captured[next(iter(self._captured))]
                step = self._captured[key] = self._capture(step)
            self._warm.add(key)
        step()
        ring, copied = self._ring[self._turn], self._copied[self._turn]
        self._turn ^= 1
        ring[:count].copy_(self._results[:count], non_blocking=True)
        copied.record()

        def results() -> list[list[float]]:
            copied.synchronize()
            found: list[list[float]] = ring[:count].tolist()
            return found

        return results

    def _step(self, rows: int, view: int, sampler: Sampler, compute: Compute) -> None:
        last, positions = self._last[:rows], self._positions[:rows]
        distribution = sampler.distribution(compute(last, positions, view))
        tokens, logprobs = sampler.choose(distribution, self._drawn[:rows])
        last.copy_(tokens)
        positions.add_(self._active[:rows])
        self._results[:rows, 0] = tokens
        self._results[:rows, 1] = logprobs


@dataclass(eq=False)
class Sequence:
    """A prompt and the tokens sampled for it so far; ``index`` numbers the samples of one request.

    ``tokens`` holds prompt and samples; ``logprobs`` and ``runs`` only cover samples. In the engine's thread,
    ``deliver`` is called once the sequence is finished, and ``progress`` after every ``stream_interval`` tokens.
    """

    request_id: str
    tokens: list[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: frozenset[int]
    seed: int | None
    deliver: Callable[["Sequence"], None]
    progress: Callable[["Sequence"], None] | None = None
    stream_interval: int = 1
    index: int = 0
    images: tuple[PlacedImage, ...] = ()
    # Behind the images, a token's rotary position is its index plus this.
    rope_offset: int = 0
    # The grammar that samples must follow, and the reason if it allows no further token.
    matcher: Matcher | None = None
    stuck: str = ""
    logprobs: list[float] = field(default_factory=list)
    # So many of the likeliest tokens are recorded for each sample.
    alternatives: int = 0
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list)
    # Each version with the number of its first sampled token.
    runs: list[tuple[str, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_length: int = 0
    # The number of prompt tokens that came from the cache.
    cached_tokens: int = 0
    # The answer names the experts of tokens from ``routed_from`` on. ``routes`` [tokens, layers, k] are the experts of
    # the first tokens, as first computed.
    routed_from: int = 0
    routes: Tensor | None = None
    # The position in the order of arrival.
    number: int = 0
    # The span of a traced request.
    traceparent: str = ""
    arrived_at: int = field(default_factory=time.time_ns)
    # The times of the first admission, of the first token, and of the end unless the request was aborted.
    admitted_at: int = 0
    sampled_at: int = 0
    ended_at: int = 0

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    def admit(self) -> None:
        """Record the time of the first admission; later ones follow preemptions."""
        self.admitted_at = self.admitted_at or time.time_ns()

    def items(self) -> "Prompt":
        """Return the tokens with the hash of its image in place of each token that stands for one."""
        if not self.images:
            return tuple(self.tokens)
        items: list[Item] = list(self.tokens)
        for image in self.images:
            items[image.position : image.end] = [image.sha256] * len(image.picture.tokens)
        return tuple(items)

    @property
    def sampled(self) -> list[int]:
        """The sampled tokens, without the prompt."""
        return self.tokens[self.prompt_length :]

    def append(
        self, token: int, logprob: float, version: str, max_length: int, ends: Callable[[], None] = lambda: None
    ) -> bool:
        """Append one sampled token; return whether the sequence is now finished.

        ``ends`` is called before other threads can see that it is.
        """
        if self.stuck:
            self.finish_reason = "abort"
            return True
        if not self.runs or self.runs[-1][0] != version:
            self.runs.append((version, len(self.logprobs)))
            self.sampled_at = self.sampled_at or time.time_ns()
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.matcher is not None:
            self.matcher.accept(token)
        if token in self.stop_token_ids:
            self._end("stop", ends)
        elif len(self.logprobs) >= self.max_tokens or len(self.tokens) >= max_length:
            self._end("length", ends)
        return self.finish_reason is not None

    def _end(self, reason: FinishReason, ends: Callable[[], None]) -> None:
        ends()
        self.ended_at = time.time_ns()
        self.finish_reason = reason

    def spans(self, count: int) -> list[tuple[str, int, int]]:
        """Return (version, start, end) over the first ``count`` sampled tokens."""
        runs = [(version, start) for version, start in self.runs if start < count]
        ends = [start for _, start in runs[1:]] + [count] * bool(runs)
        return [(version, start, end) for (version, start), end in zip(runs, ends, strict=True)]


def add_spans(sequence: Sequence) -> None:
    """Add the spans of a sequence that has just finished, if its request names a span.

    Pauses, weight updates and preemptions have no spans of their own: they lengthen the one that they interrupt.
    """
    above = sequence.traceparent
    if not above:
        return
    ended = sequence.ended_at or time.time_ns()
    admitted, sampled = sequence.admitted_at or ended, sequence.sampled_at or ended
    tracing.add_below(above, "wait for engine", sequence.arrived_at, admitted, {})
    if sequence.admitted_at:
        tokens: dict[str, Value] = {
            "gen_ai.usage.input_tokens": sequence.prompt_length,
            "rl_async.cached_tokens": sequence.cached_tokens,
        }
        tracing.add_below(above, "prefill", admitted, sampled, tokens)
    if sequence.sampled_at:
        reason = sequence.finish_reason or ""
        about: dict[str, Value] = {
            "gen_ai.usage.output_tokens": len(sequence.logprobs),
            "gen_ai.response.finish_reasons": [reason],
            "rl_async.versions": [version for version, _ in sequence.runs],
        }
        tracing.add_below(above, "decode", sampled, ended, about)


ATTENTION = "rl_async_embedded"


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention; the signature is that of ``AttentionInterface``.

    Without a mask, the queries of a layer with a window belong to the last tokens of keys and values.
    """
    if attention_mask is not None or sliding_window is None:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return out, None

    def attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scaling, enable_gqa=True)

    return windowed(query, key, value, sliding_window, attend).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


# The log-probabilities of these models are the log-softmax of lm_head(model(...)); a test compares each of them with a
# plain forward pass.
SERVED = (
    *("arcee", "exaone4", "gemma3_text", "lfm2", "llama", "ministral", "mistral", "olmo2", "olmo3", "phi3", "qwen2"),
    *("qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3"),
)
LAYERS = {FULL := "full_attention", SLIDING := "sliding_attention", "linear_attention", "conv"}
# Other rotary embeddings depend on the longest sequence of the batch.
ROPES = ("default", "linear", "llama3", "yarn")


def why_not_served(config: Any) -> str | None:
    """Name the setting in a Hugging Face config that would make batched results differ from a plain forward pass.

    Returns None for a model that can be served.
    """
    if config.model_type not in (*SERVED, *SERVED_WITH_IMAGES):
        return f"model type {config.model_type!r}"
    config = config.get_text_config()
    if kinds := set(getattr(config, "layer_types", None) or ()) - LAYERS:
        return f"layers of kind {', '.join(sorted(kinds))}"
    for name in ("final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, name, None):
            return name
    ropes = config.rope_parameters or {}
    # Gemma 3 has a rotary embedding for each kind of layer.
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and (kind := rope.get("rope_type", "default")) not in ROPES:
            return f"rotary embedding {kind!r}"
    return None


def visible(
    config: Any, positions: Tensor, width: int, images: Tensor | None = None
) -> Tensor | dict[str, Tensor | None]:
    """Return masks of the first ``width`` positions that the tokens at ``positions`` [N, T] see, in the model's form.

    A mask is bool [N, 1, T, width]; a model with several kinds of layers takes one for each kind. Layers with a window
    need none for the last T positions of a single sequence, if they attend in blocks (``attention``). The tokens of an
    image see one another if ``images`` [N, width] has its number for each of them, and -1 for text.
    """
    at, sees = positions[:, None, :, None], torch.arange(width, device=positions.device)
    if images is not None:
        causal = sees <= at
        mine = images.gather(1, positions.clamp(max=width - 1).expand(len(images), -1))[:, None, :, None]
        both = causal | ((mine == images[:, None, None]) & (mine >= 0))
        return {FULL: both, SLIDING: both & (sees > at - config.sliding_window)}
    # Layers with a state have no mask.
    kinds = set(getattr(config, "layer_types", None) or ()) & {FULL, SLIDING}
    window = getattr(config, "sliding_window", None)
    if window is None or (kinds and SLIDING not in kinds):
        return sees <= at
    if not kinds:
        return (sees <= at) & (sees > at - window)
    masks: dict[str, Tensor | None] = {FULL: sees <= at} if FULL in kinds else {}
    in_blocks = config._attn_implementation == ATTENTION and len(positions) == 1 and positions.shape[1] > 1
    masks[SLIDING] = None if in_blocks else (sees <= at) & (sees > at - window)
    return masks


def visible_in_prompts(config: Any) -> dict[str, None] | None:
    """Return the masks for whole prompts, which have none if layers with a window attend in blocks.

    With None the model makes its own masks, whose size is the square of the length.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    if config._attn_implementation != ATTENTION or SLIDING not in kinds:
        return None
    return dict.fromkeys(kinds)


# The most padded tokens in a prefill pass.
PREFILL_TOKENS = 32_768
# A product with this many multiplications takes some hundred microseconds, about as long as a barrier between threads.
ONE_THREAD = 2**24
# This many more tokens must fit, so that an admitted sequence is not preempted at once.
HEADROOM = 32

# Two prompts are equal if their tokens and images are.
Prompt = tuple[Item, ...]
# The forms of masks that Transformers' models accept.
Mask = Tensor | Mapping[str, Tensor | None] | None


def _check_served(model: nn.Module) -> None:
    """Raise UserError for a model whose batched results would differ from a plain forward pass."""
    config: Any = model.config
    found = why_not_served(config)
    if found is None and config._attn_implementation not in ("sdpa", ATTENTION):
        found = f"attn_implementation {config._attn_implementation!r}"
    if found is not None:
        raise UserError(
            f"model.path: the embedded engine serves {', '.join((*SERVED, *SERVED_WITH_IMAGES))} with full or sliding "
            f"attention (sdpa) and rotary embedding {', '.join(ROPES)}; this model has {found}. Use rollout.engine: "
            "vllm"
        )


def _cache_argument(decoder: Any) -> str:
    """Return the name of a decoder's cache argument, which Transformers 5.24 changed."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"


class EngineCore:
    """The scheduler: waiting and running sequences, and their caches. ``version`` names the weights in use.

    Keys and values take at most ``cache_bytes``, and no more than twice the need of ``max_batch`` sequences of
    ``max_length``; with ``reuse_prefixes``, the part that running sequences leave holds prefixes. With
    ``record_routes``, sequences record the experts of their tokens. Without ``pictures``, prompts have no images.

    With ``capture``, decode steps are static (``StaticSteps``) for models and rows that allow it, and the results of a
    step are read one iteration late. Call ``settle`` before other methods than ``step`` and ``add`` then.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_batch: int,
        max_length: int,
        cache_bytes: int | None = None,
        reuse_prefixes: bool = True,
        min_iteration_s: float = 0.0,
        record_routes: bool = False,
        pictures: PictureProcessor | None = None,
        capture: Capture | None = None,
    ) -> None:
        _check_served(model)
        # nn.Module does not type the attributes of Transformers' models.
        whole: Any = model
        self.model = whole
        self.max_batch, self.max_length, self.min_iteration_s = max_batch, max_length, min_iteration_s
        config = whole.config.get_text_config()
        self._config, self._decoder = config, whole.get_decoder()
        self.pictures = pictures
        self._vision = None if pictures is None else VisionInputs(model, pictures)
        # Whether the tokens of an image see one another.
        self._bidirectional = pictures is not None and whole.config.model_type in BIDIRECTIONAL
        self.vocab_size: int = config.vocab_size
        self._cache_argument = _cache_argument(self._decoder)
        self._recorder = RouteRecorder(model) if record_routes and experts_of(config) else None
        # The maximal size of the cache.
        self.cache_tokens = cache_tokens(model, max_batch, max_length, cache_bytes, self._recorder)
        self.version = "default"
        self.waiting: deque[Sequence] = deque()
        # Sequences that arrive while ``holding`` are not admitted before ``release``.
        self.held: list[Sequence] = []
        self.holding = False
        self.running: list[Sequence] = []
        self.sampled_tokens = self.preemptions = self.prompt_tokens = self.cached_tokens = 0
        self._numbers = itertools.count(1)
        self._generators: dict[Sequence, torch.Generator] = {}
        self._sampler: Sampler | None = None
        self._last: Tensor = torch.zeros(0, dtype=torch.int64)
        # Of a state only the last is kept, not that of each block of tokens.
        self._reuse_prefixes = reuse_prefixes and not mixers_of(model)
        keep_states(model)
        # Experts and layers with a state compute with sizes that depend on data, and images shift positions.
        static = pictures is None and not experts_of(config) and not mixers_of(model)
        self._capture = capture if static else None
        self._unread: tuple[list[Sequence], Callable[[], list[list[float]]]] | None = None
        # Whether the weights changed since running sequences were computed.
        self._outdated = False
        self._new_cache()

    def _new_cache(self) -> None:
        self.device = next(self.model.parameters()).device
        layers = self._config.num_hidden_layers
        self._cache = SlotCache(layers, self.max_batch, self.max_length, self.cache_tokens, self.device, self._recorder)
        self._prefixes = PrefixCache()
        self._output_weight: Tensor | None = None
        self._steps: StaticSteps | None = None
        if self._capture is not None:
            self._steps = StaticSteps(self.max_batch, self.max_length, self.device, self._capture)

    @property
    def unfinished(self) -> int:
        """The number of sequences that are running, waiting or held."""
        return len(self.running) + len(self.waiting) + len(self.held)

    @property
    def cache_bytes(self) -> int:
        """The bytes allocated for keys and values of running sequences and prefixes."""
        return self._cache.nbytes() + self._prefixes.nbytes

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that ``refusal`` has accepted."""
        sequence.number = next(self._numbers)
        if self._vision is not None:
            sequence.rope_offset = self._vision.offset(sequence.images)
        if sequence.seed is not None:
            self._generators[sequence] = torch.Generator(self.device).manual_seed(sequence.seed)
        (self.held if self.holding else self.waiting).append(sequence)

    def release(self) -> None:
        """End ``holding``: sequences that arrived meanwhile join the queue."""
        self.waiting.extend(self.held)
        self.held, self.holding = [], False

    def refusal(self, tokens: list[int], max_tokens: int) -> str | None:
        """Return why a request cannot be served, or None."""
        if not tokens:
            return "token_ids is empty"
        if len(tokens) + 1 > self.max_length:
            return f"the prompt has {len(tokens)} tokens; at most {self.max_length - 1} fit (max_model_len)"
        if not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
            return f"token_ids must lie in [0, {self.vocab_size})"
        if max_tokens < 1:
            return "max_tokens must be at least 1"
        return None

    @torch.inference_mode()
    def abort(self, which: str | Sequence | None) -> list[Sequence]:
        """Finish the sequences of a request id, a single one, or all for None, with reason ``abort``; return them."""
        everyone = (*self.running, *self.waiting, *self.held)
        gone = [s for s in everyone if which is None or s is which or s.request_id == which]
        for slot, sequence in enumerate(self.running):
            if sequence in gone:
                self._record(slot, sequence)
        for sequence in gone:
            sequence.finish_reason = "abort"
        self.waiting = deque(s for s in self.waiting if s.finish_reason is None)
        self.held = [s for s in self.held if s.finish_reason is None]
        self._drop_finished()
        for sequence in gone:
            self._generators.pop(sequence, None)
        return gone

    def preempt(self) -> None:
        """Move all running sequences back to the head of the queue; their caches will be recomputed."""
        assert self._unread is None
        self.preemptions += len(self.running)
        for slot, sequence in enumerate(self.running):
            self._record(slot, sequence)
        self.waiting.extendleft(sorted(self.running, key=lambda s: s.number, reverse=True))
        self.running = []
        self._sampler, self._outdated = None, False

    def weights_changed(self, *, in_place: bool = True) -> None:
        """Drop results of older weights, except caches of running sequences; call ``preempt`` to recompute these.

        Weights that do not change ``in_place`` are not those that captured steps read.
        """
        assert self._unread is None
        if self._steps is not None and not in_place:
            self._steps.forget()
        self._prefixes.clear()
        self._output_weight = None
        self._outdated = bool(self.running)

    def free_cache(self) -> None:
        """Free the cache's memory, preempting the running sequences."""
        self.preempt()
        self._new_cache()

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Run one iteration; return the sequences that it finished."""
        began = time.monotonic()
        finished: list[Sequence] = []
        if admitted := self._admit():
            finished += self.settle()
            finished += self._prefill(admitted)
        if self.running:
            finished += self._decode()
        if self.min_iteration_s:
            time.sleep(max(0.0, began + self.min_iteration_s - time.monotonic()))
        return finished

    def _admit(self) -> list[Sequence]:
        batch: list[Sequence] = []
        prompts: set[Prompt] = set()
        longest, running = 0, self._longest()
        while self.waiting and (count := len(self.running) + len(batch)) < self.max_batch:
            prompts.add(self.waiting[0].items())
            longest = max(longest, len(self.waiting[0].tokens))
            if batch and longest * len(prompts) > PREFILL_TOKENS:
                break
            length = min(max(longest, running) + HEADROOM, self.max_length)
            if count and not self._cache.fits(count + 1, length):
                break
            batch.append(self.waiting.popleft())
            batch[-1].admit()
        return batch

    def _prefill(self, batch: list[Sequence]) -> list[Sequence]:
        """Compute each prompt once, in the slot of its first sequence, and copy it to the slots of the others."""
        by_prompt: dict[Prompt, list[Sequence]] = {}
        for sequence in batch:
            by_prompt.setdefault(sequence.items(), []).append(sequence)
        known = {prompt: self._known(prompt, sequences[0]) for prompt, sequences in by_prompt.items()}
        # Prompts without a known prefix come first, so that each of the two passes has contiguous slots.
        prompts = sorted(by_prompt, key=lambda prompt: bool(known[prompt]))
        fresh = sum(not known[prompt] for prompt in prompts)
        first, longest = len(self.running), max(map(len, prompts))
        self._reserve(first + len(batch), min(longest + 1, self.max_length))
        leaders = [by_prompt[prompt][0] for prompt in prompts]
        hidden = [self._whole(first, leaders[:fresh])] if fresh else []
        if fresh < len(prompts):
            hidden.append(self._ends(first + fresh, leaders[fresh:], [known[prompt] for prompt in prompts[fresh:]]))
        others = [(row, sequence) for row, prompt in enumerate(prompts) for sequence in by_prompt[prompt][1:]]
        self._cache.move([first + row for row, _ in others], range(first + len(prompts), first + len(batch)), longest)
        batch = leaders + [sequence for _, sequence in others]
        self._count(batch, known)
        rows = torch.tensor([*range(len(prompts)), *(row for row, _ in others)], device=self.device)
        self.running += batch
        for row, prompt in enumerate(prompts):
            self._keep(first + row, prompt)
        tokens, logprobs = self._sample(self._make_sampler(batch), batch, self._logits(torch.cat(hidden))[rows])
        self._last = torch.cat([self._last[:first].to(self.device), tokens])
        self._sampler = None
        return self._append(list(enumerate(batch, first)), tokens.tolist(), logprobs.tolist())

    def _known(self, prompt: Prompt, sequence: Sequence) -> list[Block]:
        """Return the blocks of the longest known prefix; it ends in no image whose tokens see one another."""
        found = self._prefixes.find(prompt)
        # From the last one on, since a prefix that ends before an image may end in an earlier one.
        for image in reversed(sequence.images) if self._bidirectional else ():
            if image.position < BLOCK * len(found) < image.end:
                found = found[: image.position // BLOCK]
        return found

    def _whole(self, first: int, batch: list[Sequence]) -> Tensor:
        """Compute prompts from their start, in slots from ``first`` on; return the hidden state of each last token."""
        prompts = [sequence.tokens for sequence in batch]
        width = max(map(len, prompts))
        padded = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=self.device)
        self._cache.prefill_at(first, list(map(len, prompts)))
        positions = torch.arange(width, device=self.device)[None]
        images = self._images_in_full(batch, width)
        mask = visible_in_prompts(self._config) if images is None else visible(self._config, positions, width, images)
        hidden = self._prefilled(batch, [0] * len(batch), padded, positions, mask)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        return hidden[torch.arange(len(prompts), device=self.device), lengths - 1]

    def _ends(self, first: int, batch: list[Sequence], known: list[list[Block]]) -> Tensor:
        """Compute prompts whose first blocks are known, in slots from ``first`` on, like ``_whole``."""
        prompts = [sequence.tokens for sequence in batch]
        for row, blocks in enumerate(known):
            self._cache.write(first + row, joined(blocks))
            if routes := [block.routes for block in blocks if block.routes is not None]:
                self._cache.write_routes(first + row, torch.cat(routes))
        starts = [BLOCK * len(blocks) for blocks in known]
        ends = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        width, view = max(map(len, ends)), max(map(len, prompts))
        padded = torch.tensor([end + [0] * (width - len(end)) for end in ends], device=self.device)
        at = torch.arange(width, device=self.device) + torch.tensor(starts, device=self.device)[:, None]
        lengths = torch.tensor([len(end) for end in ends], device=self.device)
        rows, columns = (torch.arange(width, device=self.device) < lengths[:, None]).nonzero(as_tuple=True)
        self._cache.extend_at(first, rows, columns, at[rows, columns], view)
        mask = visible(self._config, at, view, self._images_in_full(batch, view))
        # Padding only needs valid positions, since its results are never read.
        hidden = self._prefilled(batch, starts, padded, at.clamp(max=self.max_length - 1), mask)
        return hidden[torch.arange(len(prompts), device=self.device), lengths - 1]

    def _images_in_full(self, batch: list[Sequence], width: int) -> Tensor | None:
        """Return the number of the image behind each token [N, width], -1 for text, for ``visible``; None without any.

        Returns None too for models whose images are attended to as text is.
        """
        if not self._bidirectional or not any(sequence.images for sequence in batch):
            return None
        numbers = torch.full((len(batch), width), -1)
        for row, sequence in enumerate(batch):
            for number, image in enumerate(sequence.images):
                numbers[row, image.features] = number
        return numbers.to(self.device)

    def _prefilled(
        self, batch: list[Sequence], starts: list[int], tokens: Tensor, positions: Tensor, mask: Mask
    ) -> Tensor:
        """Compute ``tokens`` [N, T] of prompts, each from its start in ``starts``, with their images."""
        if self._vision is None:
            return self._forward(tokens, positions, mask)
        positions = self._vision.positions([(s.images, len(s.tokens)) for s in batch], positions)
        inputs = self._vision.inputs(tokens, [(s.images, start) for s, start in zip(batch, starts, strict=True)])
        return self._forward(tokens, positions, mask, inputs)

    def _forward(
        self, tokens: Tensor, positions: Tensor, mask: Mask, inputs: Mapping[str, Any] | None = None
    ) -> Tensor:
        """Compute tokens [N, T], or the decoder's ``inputs`` for them; return hidden states [N, T, hidden]."""
        hidden = self._decoder(
            **(inputs or {"input_ids": tokens}),
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_argument: self._cache},
        ).last_hidden_state
        self._cache.record(*tokens.shape)
        return hidden

    def _record(self, slot: int, sequence: Sequence) -> None:
        """Append the experts of newly fed tokens to those of a sequence.

        Tokens that are recomputed with newer weights keep the experts of their first computation, which sampled the
        next token.
        """
        known = 0 if sequence.routes is None else len(sequence.routes)
        experts = self._cache.routes(slot, known, len(sequence.tokens) - 1)
        if experts is not None:
            sequence.routes = experts if sequence.routes is None else torch.cat([sequence.routes, experts])

    @torch.inference_mode()
    def settle(self) -> list[Sequence]:
        """Read the results of the latest step, unless they have been read; return the sequences that it finished."""
        unread, self._unread = self._unread, None
        if unread is None:
            return []
        slots = {sequence: slot for slot, sequence in enumerate(self.running)}
        # The others ended in the step before, or were aborted.
        found = [(s, result) for s, result in zip(unread[0], unread[1](), strict=True) if s in slots]
        tokens, logprobs = [int(token) for _, (token, _) in found], [logprob for _, (_, logprob) in found]
        return self._append([(slots[s], s) for s, _ in found], tokens, logprobs)

    def _longest(self) -> int:
        """Return the length of the longest running sequence, with a token that was sampled but not read."""
        return max((len(s.tokens) for s in self.running), default=0) + (self._unread is not None)

    def _decode(self) -> list[Sequence]:
        """Decode all running sequences, by a static step if their samplers allow it and padded rows fit."""
        steps, finished = self._steps, list[Sequence]()
        if steps is not None and not any(s.matcher or s.alternatives for s in self.running):
            rows, longest = steps.rows(len(self.running)), self._longest()
            if self._cache.fits(rows, longest):
                if rows > self._cache.slots or longest > self._cache.length:
                    # Results that are still to come would be of the memory before.
                    finished = self.settle()
                    self._reserve(rows, longest)
                return finished + self._decode_static(steps)
        finished = self.settle()
        if steps is not None and steps.holds(self._last):
            self._last, self._sampler = self._last.clone(), None
        return finished + (self._decode_eagerly() if self.running else [])

    def _decode_static(self, steps: StaticSteps) -> list[Sequence]:
        """Launch the next step, then read the results of the previous one."""
        ahead = self._unread is not None
        launched = None
        if any(
            len(s.logprobs) + ahead < s.max_tokens and len(s.tokens) + ahead < self.max_length for s in self.running
        ):
            if not steps.holds(self._last):
                self._last = steps.place(self._last, [len(s.tokens) - 1 for s in self.running])
                self._sampler = None
            if self._sampler is None:
                self._sampler = self._make_sampler(self.running, steps.rows(len(self.running)))
            with _threads(self._config, len(self.running), self.device):
                results = steps.launch(self._sampler, self._longest(), self._cache.length, self._static_logits)
            launched = list(self.running), results
        finished = self.settle()
        # Only rows that ended in the step before are in a step without running ones.
        self._unread = launched if self.running else None
        return finished

    def _static_logits(self, last: Tensor, positions: Tensor, view: int) -> Tensor:
        self._cache.decode_at(positions, view)
        mask = visible(self._config, positions[:, None], view)
        return self._logits(self._forward(last[:, None], positions[:, None], mask)[:, 0])

    def _decode_eagerly(self) -> list[Sequence]:
        lengths = self._make_room()
        count, view = len(lengths), max(lengths)
        # The last token of each sequence is fed now, and is not in the cache yet.
        positions = torch.tensor(lengths, device=self.device) - 1
        self._cache.decode_at(positions, view)
        mask = visible(self._config, positions[:, None], view)
        if self._vision is not None:
            positions = positions + torch.tensor([s.rope_offset for s in self.running], device=self.device)
        with _threads(self._config, count, self.device):
            hidden = self._forward(self._last[:count, None], positions[:, None], mask)
        if self._sampler is None:
            self._sampler = self._make_sampler(self.running)
        tokens, logprobs = self._sample(self._sampler, self.running, self._logits(hidden[:, 0]))
        self._last = tokens
        return self._append(list(enumerate(self.running)), tokens.tolist(), logprobs.tolist())

    def _make_room(self) -> list[int]:
        """Preempt the youngest sequences until the rest fits, and return the lengths of the running ones."""
        while not self._cache.fits(len(self.running), max(len(s.tokens) for s in self.running)):
            youngest = max(self.running, key=lambda s: s.number)
            self._record(self.running.index(youngest), youngest)
            self.preemptions += 1
            self.waiting.appendleft(youngest)
            self._compact([s is not youngest for s in self.running])
        lengths = [len(s.tokens) for s in self.running]
        self._reserve(len(lengths), max(lengths))
        return lengths

    def _reserve(self, slots: int, length: int) -> None:
        """Grow the cache to ``length`` per slot and the longest running sequence, evicting prefixes if needed."""
        filled = max((len(s.tokens) - 1 for s in self.running), default=0)
        if self._cache.reserve(slots, max(length, filled + 1), len(self.running), filled) and self._steps is not None:
            self._steps.forget()
        self._prefixes.shrink(self.cache_tokens - self._cache.tokens)

    def _keep(self, slot: int, items: Prompt) -> None:
        """Keep a slot's keys and values of these items as a prefix for later prompts."""
        if self._reuse_prefixes and not self._outdated:
            room = self.cache_tokens - self._cache.tokens
            read, routes = partial(self._cache.read, slot), partial(self._cache.routes, slot)
            self._prefixes.keep(items, read, room, routes)

    def _count(self, batch: list[Sequence], known: dict[Prompt, list[Block]]) -> None:
        """Count the cached tokens of each sequence. In ``batch``, the first sequence of each prompt comes first."""
        seen: set[Prompt] = set()
        for sequence in batch:
            prompt = sequence.items()
            cached = len(prompt) if prompt in seen else BLOCK * len(known[prompt])
            seen.add(prompt)
            self.prompt_tokens += len(prompt)
            self.cached_tokens += cached
            if not sequence.logprobs:
                sequence.cached_tokens = cached

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self.model.lm_head
        if self._output_weight is None:
            self._output_weight = widened(head.weight)
        return output_logits(hidden, self._output_weight, head.bias)

    def _make_sampler(self, batch: list[Sequence], rows: int = 0) -> Sampler:
        """Make a sampler for a batch, padded to ``rows`` that sample like the last sequence, but without its seed."""
        padding = max(0, rows - len(batch))
        samplings = [s.sampling for s in batch] + [batch[-1].sampling] * padding
        return Sampler(samplings, [*map(self._generators.get, batch), *[None] * padding], self.device)

    def _sample(self, sampler: Sampler, batch: list[Sequence], logits: Tensor) -> tuple[Tensor, Tensor]:
        """Sample a token for each sequence, under its grammar if it has one."""
        for row, reason in restrict(logits, [sequence.matcher for sequence in batch]).items():
            batch[row].stuck = reason
        distribution = sampler.distribution(logits)
        if most := max(sequence.alternatives for sequence in batch):
            found = distribution.topk(min(most, distribution.shape[1]))
            for sequence, tokens, logprobs in zip(batch, found.indices.tolist(), found.values.tolist(), strict=True):
                if sequence.alternatives:
                    pairs = list(zip(tokens, logprobs, strict=True))[: sequence.alternatives]
                    # Tokens that the sampler dropped, or a grammar, have no logarithm that JSON could hold.
                    sequence.likeliest.append([pair for pair in pairs if pair[1] > -math.inf])
        return sampler.draw(distribution)

    def _append(self, batch: list[tuple[int, Sequence]], tokens: list[int], logprobs: list[float]) -> list[Sequence]:
        """Append a token to each sequence of the batch, given with its slot."""
        self.sampled_tokens += len(batch)
        finished = []
        for (slot, sequence), token, logprob in zip(batch, tokens, logprobs, strict=True):
            ends = partial(self._record, slot, sequence)
            if sequence.append(token, logprob, self.version, self.max_length, ends):
                finished.append(sequence)
                self._generators.pop(sequence, None)
            if sequence.progress is not None and len(sequence.logprobs) % sequence.stream_interval == 0:
                sequence.progress(sequence)
        if finished:
            self._drop_finished()
        return finished

    def _drop_finished(self) -> None:
        """Free the slots of finished sequences, and keep their keys and values as prefixes for later prompts."""
        keep = [s.finish_reason is None for s in self.running]
        if all(keep):
            return
        for slot, sequence in enumerate(self.running):
            if not keep[slot]:
                # The last token was not fed.
                self._keep(slot, sequence.items()[:-1])
        self._compact(keep)

    def _compact(self, keep: list[bool]) -> None:
        """Free the slots without ``keep``, and move the last running ones into the gaps."""
        count = sum(keep)
        gaps = [slot for slot in range(count) if not keep[slot]]
        movers = [slot for slot in range(count, len(keep)) if keep[slot]]
        self._cache.move(movers, gaps, max((len(self.running[slot].tokens) for slot in movers), default=0))
        for gap, mover in zip(gaps, movers, strict=True):
            self.running[gap] = self.running[mover]
            self._last[gap] = self._last[mover]
        del self.running[count:]
        if self._steps is not None and self._steps.holds(self._last):
            self._last = self._steps.compact(count, gaps, movers)
        else:
            self._last = self._last[:count]
        self._sampler, self._outdated = None, self._outdated and count > 0


@contextmanager
def _threads(config: Any, rows: int, device: torch.device) -> Iterator[None]:
    """Use a single thread for layers so small that several would mostly wait for one another.

    Threads that first compute meanwhile inherit this count, and must set their own.
    """
    threads = torch.get_num_threads()
    few = device.type == "cpu" and rows * config.hidden_size * getattr(config, "intermediate_size", 0) <= ONE_THREAD
    if few:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if few:
            torch.set_num_threads(threads)
