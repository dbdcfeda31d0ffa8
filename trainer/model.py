"""A Hugging Face language model with its heads, their log-probabilities, the layers' kernels, and router replay.

In go packed or padded micro-batches; out come ``Outputs`` per token. Model and heads are one module, so that
``fully_shard`` gathers every weight where it is used. To let rows of another kind of model be packed, add it to
``families.FAMILIES``; its test compares it with one row at a time.

Logits [rows, V] exist for one chunk of rows at a time, in the forward pass and again in the backward pass, which
computes them anew: only a few numbers per row are kept between the two.

Router replay (R3, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
arXiv:2510.11370) sends tokens through the experts that the engine chose. A router's choice is a step function, so
that rounding, or weights a step older, send a token through other experts than those that it was sampled with. Only
the choice is replayed. Its weights are the softmax of the trainer's logits over the experts of the record (for a
router that does not normalise, their probabilities), so the router learns through them.

    rows' records ──> Tensors.experts ──> packed as tokens are ──> layer(..., routed_experts) ──> its router

A layer gets the record as an argument, so that it is there again when the layer is recomputed for the backward pass.
"""

import logging
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from rl_async.configs.schema.data import ATTENTION_KEY, FLASH_ATTN
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import DataError, UserError
from rl_async.model_files import experts_of, mixers_of, refuse_quantized
from rl_async.pictures import PictureProcessor
from rl_async.torch_shared import bfloat16_products, has_flash_attention, output_logits, widened
from rl_async.trainer.attention import (
    NAME,
    NAME_BY_PACKAGE,
    Sharing,
    exchanged,
    gathered,
    package_kernel,
    packed_attention,
)
from rl_async.trainer.backend import OutputName, Outputs, policy_outputs
from rl_async.trainer.batch_layout import TowerCost
from rl_async.trainer.families import LogitForm, logit_form, reads_images, text_of, why_not_shared, why_padded
from rl_async.trainer.packing import Images, Packed, PackedTree, RowCalls, Tensors, TreeCalls, embedded
from rl_async.trainer.pretrained import Pretrained, StoredWeights, skeleton

log = logging.getLogger("rl_async.trainer")

Head = Literal["policy", "value", "both"]

MODEL_FOLDER = "model"
VALUE_HEAD_FILE = "value_head.safetensors"
# The prefix of its tensors in a checkpoint's shards.
VALUE_HEAD = "value_head."
# Weights of a vision tower that each patch meets, but for embeddings of positions.
_PATCHES = re.compile(r"patch_embed|(^|\.)(blocks|layers)\.")


class ValueHead(torch.nn.Linear):
    """Maps hidden states [B, T, H] to one number each [B, T], initially 0.

    Zeros make every rank start alike and keep the first gradients out of the backbone. The result is not a view of
    another tensor: writing to a view would lose FSDP's hooks.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight[0] + self.bias


class Headed(torch.nn.Module):
    """A language model with its heads.

    ``lm`` is a Hugging Face causal LM, or with head "value" the decoder without its logits; either may have a vision
    tower, whose images ``pictures`` encodes. Ranks that share rows pass the same ones, and each gets the outputs of all
    of their tokens.
    """

    def __init__(
        self,
        lm: Any,
        head: Head,
        sharing: Sharing | None = None,
        shares_prefixes: bool = False,
        pictures: PictureProcessor | None = None,
    ) -> None:
        super().__init__()
        self.lm = lm
        self.value_head = None if head == "policy" else ValueHead(text_of(lm.config).hidden_size)
        self.has_logits = head != "value"
        self.packs = why_padded(lm.config) is None
        if self.packs:
            keep_rows_apart(lm)
        self.sharing = sharing
        self.shares_prefixes = shares_prefixes
        self.replay: RouterReplay | None = None
        self.pictures = pictures
        self._blank: Mapping[str, Tensor] | None = None

    @property
    def decoder(self) -> Any:
        """The language model without its last layer, and without a vision tower."""
        base = self.lm.base_model
        return base if self.pictures is None else base.get_decoder()

    @property
    def tower(self) -> list[Any]:
        """The modules that only images go through: the vision tower and its projector."""
        decoder = self.decoder
        return [] if self.pictures is None else [part for part in self.lm.base_model.children() if part is not decoder]

    def tower_layers(self) -> list[Any]:
        """Return the layers of the vision tower, which are those of its lists of modules."""
        parts = [part for whole in self.tower for part in whole.modules()]
        return [layer for part in parts if isinstance(part, torch.nn.ModuleList) for layer in part]

    def tower_cost(self, *, trains: bool) -> TowerCost | None:
        """Derive the cost of the vision tower's pass: 2 operations for each weight that a patch or a feature meets, and
        4 per element of a state for each pair of patches of one image (scores, and their sum over values).
        """
        if self.pictures is None:
            return None
        sizes = self.lm.config.vision_config
        depth = getattr(sizes, "depth", None) or sizes.num_hidden_layers
        weights = {
            name: weight.numel() for part in self.tower for name, weight in part.named_parameters() if weight.dim() > 1
        }
        of_patches = sum(count for name, count in weights.items() if _PATCHES.search(name))
        of_features = sum(count for name, count in weights.items() if not _PATCHES.search(name) and "pos" not in name)
        return TowerCost(2 * of_patches, 4 * depth * sizes.hidden_size, 2 * of_features, sizes.patch_size, trains)

    def train_tower(self, trains: bool) -> None:
        """Freeze the vision tower, or train it, even with micro-batches that show no image.

        Ranks exchange the gradients of all that trains, so that each has to have them.
        """
        for part in self.tower:
            part.requires_grad_(trains)
        if trains and self.pictures is not None:
            self._blank = {name: torch.from_numpy(array) for name, array in self.pictures.blank().items()}

    def outputs(self, batch: Tensors, requested: frozenset[OutputName]) -> Outputs:
        """Run a micro-batch: packed if the model can be, computing shared prefixes once, and padded otherwise.

        Raises DataError for rows with images if the model reads none.
        """
        if batch.images is not None and self.pictures is None:
            raise DataError(
                "rows show images, and a reference, critic or teacher reads none; give it a vision-language model"
            )
        if not self.packs:
            return Outputs(**self(batch, requested))
        if self.replay is not None and batch.experts is not None:
            check_records(batch.experts, self.lm.config)
        packed = batch.packed(self.shares_prefixes)
        flat: dict[str, Tensor | None]
        if self.sharing is None or isinstance(packed, PackedTree):
            flat = self(packed, requested)
        else:
            own, group = packed.share(self.sharing.rank, self.sharing.size), self.sharing.group
            flat = {
                name: None if part is None else gathered(part, group) for name, part in self(own, requested).items()
            }
        return Outputs(**{name: None if part is None else packed.unpack(part) for name, part in flat.items()})

    def forward(
        self, batch: Packed | PackedTree | Tensors, requested: frozenset[OutputName]
    ) -> dict[str, Tensor | None]:
        """Compute the fields of ``Outputs``, none of them a view.

        They are [N, ...] for a packed batch, [M, ...] for a packed tree, and [B, T-1, ...] for a padded one.

        Log-probabilities are computed here, where FSDP has gathered lm_head's weight, once for all chunks.
        """
        if isinstance(batch, Packed | PackedTree):
            return self._packed(batch, requested)
        return self._padded(batch, requested)

    def _packed(self, packed: Packed | PackedTree, requested: frozenset[OutputName]) -> dict[str, Tensor | None]:
        inputs = packed.backbone_inputs()
        if (images := self._images(packed)) is not None:
            del inputs["input_ids"]
            inputs |= embedded(self.lm, packed.tokens, images)
        if self.sharing is not None:
            inputs["sharing_ranks"] = self.sharing.group
        outputs: dict[str, Tensor | None] = {}
        if self.replay is None or packed.experts is None:
            states = self.decoder(**inputs).last_hidden_state[0]
        else:
            self.replay.begin()
            states = self.decoder(**inputs, routed_experts=packed.experts).last_hidden_state[0]
            outputs["agreement"] = packed.predicting(self.replay.end()[:, None])[:, 0]
        hidden = packed.predicting(states)
        if self.has_logits:
            head = LogitHead(self.lm.lm_head.weight, self.lm.lm_head.bias, logit_form(self.lm.config))
            outputs |= token_stats(hidden, head, packed.targets, packed.temperature, requested, packed.kept)._asdict()
            if "distribution" in requested:
                outputs["distribution"] = head_logits(hidden, head, packed.temperature).log_softmax(-1)
        if not self.has_logits or "values" in requested:
            outputs["values"] = self._values(hidden)
        return outputs

    def _padded(self, batch: Tensors, requested: frozenset[OutputName]) -> dict[str, Tensor | None]:
        """Run a padded batch: padding stands behind every real token, where causal attention never looks."""
        inputs: dict[str, Any] = {"input_ids": batch.tokens}
        if (images := self._images(batch)) is not None:
            inputs = embedded(self.lm, batch.tokens, images)
        if not self.has_logits:
            hidden = self.lm(**inputs, use_cache=False).last_hidden_state
            return {"values": self._values(hidden[:, :-1])}
        out = self.lm(**inputs, use_cache=False, output_hidden_states="values" in requested)
        logits = out.logits[:, :-1].float() / batch.temperature
        if batch.kept is not None:
            logits = restricted(logits.flatten(0, 1), batch.kept[:, 1:].flatten(0, 1)).view_as(logits)
        outputs = policy_outputs(logits, batch.tokens[:, 1:], requested - {"values"})
        values = self._values(out.hidden_states[-1][:, :-1]) if "values" in requested else None
        return {name: getattr(outputs, name) for name in outputs.__struct_fields__} | {"values": values}

    def _images(self, batch: Packed | PackedTree | Tensors) -> Images | None:
        """The images to embed: those of the batch, or a blank one that no token shows."""
        if batch.images is not None or self._blank is None or not torch.is_grad_enabled():
            return batch.images
        return Images(self._blank, torch.full_like(batch.tokens, -1), positions=None)

    def _values(self, hidden: Tensor) -> Tensor:
        assert self.value_head is not None, "values are requested of a model without a value head"
        return self.value_head(hidden).float()


def build_bare(folder: Path, head: Head = "policy") -> Any:
    """Build the language model of a Hugging Face folder's config, without its weights: no parameter has memory.

    A model that can be packed attends as ``attention.py`` does, others as Transformers chooses: PyTorch's fused
    attention if it can use that, else its own; ``model.override.attention`` names another. Raises UserError if the
    trainer cannot use the model.
    """
    key, what = ("critic.path", "decoder") if head == "value" else ("model.path", "causal LM")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        refuse_quantized(getattr(config, "quantization_config", None), key, folder)
        whole: Any = AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM
        kind: Any = AutoModel if head == "value" else whole
        lm = skeleton(kind, config)
        if (chosen := getattr(config, ATTENTION_KEY, None)) and chosen != FLASH_ATTN:
            lm.set_attn_implementation(chosen)
    # Transformers raises ImportError for an implementation that is not installed.
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{key}: cannot load a {what} from {folder}: {error}") from error
    decoder = lm.base_model.get_decoder() if reads_images(lm.config) else lm.base_model
    if not hasattr(decoder, "layers") or (head != "value" and not hasattr(lm, "lm_head")):
        raise UserError(
            f"{key}: {type(lm).__name__} of {folder} has no list of decoder layers (layers) or no output layer "
            "(lm_head) of its own, which the trainer shards; use a text model"
        )
    if why_padded(lm.config) is None:
        lm.set_attn_implementation({"text_config": NAME} if reads_images(lm.config) else NAME)
    return lm


def build_headed(
    path: str,
    head: Head,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    options: TrainerConfig | None = None,
    sharing: Sharing | None = None,
) -> tuple[Headed, Pretrained]:
    """Build the float32 model of a Hugging Face folder, or of the ``critic`` folder of a checkpoint with its head.

    The language model's parameters have no memory yet; the second result fills them. The device and the dtype are
    those that the model will compute on and in. Raises UserError if ``path`` holds no such model, or if it cannot
    compute as ``options`` say.
    """
    options = options or TrainerConfig()
    saved = Path(path) / MODEL_FOLDER
    folder = saved if saved.is_dir() else Path(path)
    pictures = PictureProcessor.load(str(folder))
    key = "critic.path" if head == "value" else "model.path"
    lm = build_bare(folder, head)
    if sharing is not None and (reason := why_not_shared(lm.config, sharing.size)):
        raise UserError(f"trainer.sequence_parallel={sharing.size} does not go with {key}={path}: {reason}")
    if getattr(lm.config, ATTENTION_KEY, None) == FLASH_ATTN:
        attend_by_package(lm, device, dtype)
    pretrained = Pretrained(lm, StoredWeights(folder, key))
    if options.kernels == "liger":
        apply_liger(lm, device)
    if reason := why_padded(lm.config):
        log.warning("%s: rows of %s are padded, not packed, which is slower: %s", key, path, reason)
    if apart := why_prefixes_apart(lm.config, device, dtype, options):
        log.info("%s: what rows of %s begin with is computed for each of them: %s", key, path, apart)
    model = Headed(lm, head, sharing, shares_prefixes=apart is None, pictures=pictures)
    weights = Path(path) / VALUE_HEAD_FILE
    if model.value_head is not None and weights.is_file():
        model.value_head.load_state_dict(load_file(weights))
    return model, pretrained


def replay_routers(model: Headed, options: TrainerConfig) -> None:
    """Let a policy replay the experts that engines chose, as ``trainer.router_replay`` says.

    Raises UserError if it must and its routers cannot.
    """
    config = model.lm.config
    reason = why_not_replayed(config, packs=model.packs, compiled=options.kernels == "compile")
    if is_replayed(options, experts_of(config), reason):
        model.replay = RouterReplay(model.lm)


# --- Log-probabilities

# The logits that are in memory at once: the fastest number of those measured. A GPU needs larger matrices, and one with
# so many bytes has room for them.
CPU_CHUNK_LOGITS = 2**23
GPU_CHUNK_LOGITS = 2**26
LARGE_GPU, LARGE_GPU_CHUNK_LOGITS = 40 * 10**9, 2**28
# An accelerator multiplies the gradients of so many rows at once: each product reads and writes the whole float32
# gradient of the weight, which takes as long as the products of some hundred rows.
GPU_PRODUCT_ROWS = 4096


class TokenStats(NamedTuple):
    """Statistics of the distribution over the next token, float32 [N] each.

    Entropy and sum_squares, the sum of pi^2 over the vocabulary, are None unless requested.
    """

    logprobs: Tensor
    entropy: Tensor | None
    sum_squares: Tensor | None


class LogitHead(NamedTuple):
    """The last layer: weight [V, H], bias [V], and how its outputs become logits."""

    weight: Tensor
    bias: Tensor | None
    form: LogitForm


def token_stats(
    hidden: Tensor,
    head: LogitHead,
    targets: Tensor,
    temperature: Tensor,
    requested: frozenset[str] = frozenset(),
    kept: Tensor | None = None,
    chunk_logits: int | None = None,
    product_rows: int | None = None,
) -> TokenStats:
    """Evaluate softmax(logits / temperature) at ``targets``; gradient flows to hidden, weight and bias.

    Args:
        hidden: [N, H].
        targets: int64 [N].
        temperature: float32 [N].
        requested: of "entropy" and "sum_squares"; other names are ignored.
        kept: int64 [N, K], the tokens that the distribution is over (``restricted``); None for the whole vocabulary.
        chunk_logits: logits in memory at once, in float32; by default as suits the device.
        product_rows: rows whose gradients by logits, in the weight's type, are in memory at once and enter one product;
            by default as suits the device, and at least a chunk.
    """
    chunk = max(1, (chunk_logits or _chunk_logits(hidden.device)) // head.weight.shape[0])
    block = max(chunk, product_rows or (0 if hidden.device.type == "cpu" else GPU_PRODUCT_ROWS))
    flags = "entropy" in requested, "sum_squares" in requested
    result: Any = _Chunked.apply(
        hidden, head.weight, head.bias, targets, temperature, kept, head.form, flags, (chunk, block)
    )
    return TokenStats(*result)


@cache
def _chunk_logits(device: torch.device) -> int:
    """Return how many logits are in memory at once on a device."""
    if device.type == "cpu":
        return CPU_CHUNK_LOGITS
    large = torch.accelerator.get_memory_info(device)[1] >= LARGE_GPU
    return LARGE_GPU_CHUNK_LOGITS if large else GPU_CHUNK_LOGITS


def head_logits(hidden: Tensor, head: LogitHead, temperature: Tensor) -> Tensor:
    """Compute all logits [N, V] over the temperature in at least float32."""
    logits, form = output_logits(hidden, head.weight, head.bias), head.form
    if form.softcap is None:
        return logits.mul_(form.scale / temperature[:, None])
    return logits.mul_(form.scale / form.softcap).tanh().mul(form.softcap / temperature[:, None])


# In place of minus infinity, which times a probability of 0 is not a number.
NEVER = -1e30


def restricted(logits: Tensor, kept: Tensor) -> Tensor:
    """Return logits [N, V] with those of all tokens but ``kept`` [N, K] so low that they have probability 0.

    -1 in ``kept`` stands for no token, and a row of nothing else keeps the whole vocabulary. So a softmax is over the
    tokens that a truncating sampler chose from ("Keep Sampling Mask", DeepSeek-V3.2, arXiv:2512.02556, section 3.1).
    """
    vocabulary = logits.shape[1]
    dropped = (kept >= 0).any(1, keepdim=True).repeat(1, vocabulary + 1)
    dropped.scatter_(1, kept.remainder(vocabulary + 1), torch.zeros_like(kept, dtype=torch.bool))
    return logits.masked_fill(dropped[:, :vocabulary], NEVER)


class _Chunked(torch.autograd.Function):
    """With p = softmax(z), H the entropy and S = sum p^2, the gradients by the logits z are:

    log p_t: onehot_t - p;    H: -p (log p + H);    S: 2 p (p - S).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        kept: Tensor | None,
        form: LogitForm,
        flags: tuple[bool, bool],
        sizes: tuple[int, int],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        rows, head, chunk = hidden.shape[0], LogitHead(widened(weight), bias, form), sizes[0]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, normaliser = (torch.empty(rows, dtype=dtype, device=hidden.device) for _ in range(2))
        entropy, squares = (torch.empty_like(logprobs) if flag else None for flag in flags)
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            z = head_logits(hidden[part], head, temperature[part])
            if kept is not None:
                z = restricted(z, kept[part])
            normaliser[part] = z.logsumexp(-1)
            logprobs[part] = z.gather(1, targets[part, None])[:, 0] - normaliser[part]
            if entropy is None and squares is None:
                continue
            z -= normaliser[part, None]
            if squares is not None:
                squares[part] = (2 * z).exp_().sum(-1)
            if entropy is not None:
                entropy[part] = -(z.exp() * z).sum(-1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, kept, normaliser, entropy, squares)
        ctx.form, ctx.sizes = form, sizes
        return logprobs, entropy, squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, support, normaliser, entropy, squares = ctx.saved_tensors
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if to_hidden else None
        d_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if to_weight else None
        d_bias = torch.zeros_like(bias, dtype=normaliser.dtype) if to_bias else None
        head = LogitHead(widened(weight), bias, ctx.form)
        rows, (chunk, block) = hidden.shape[0], ctx.sizes
        # Without room for more than a chunk, its gradient is used as it is.
        kept = weight.new_empty(min(rows, block), weight.shape[0]) if block > chunk else None
        for first in range(0, rows, block):
            last = min(first + block, rows)
            for start in range(first, last, chunk):
                part = slice(start, min(start + chunk, last))
                z = head_logits(hidden[part], head, temperature[part])
                slope = _slope(z, ctx.form, temperature[part])
                if support is not None:
                    z = restricted(z, support[part])
                z -= normaliser[part, None]
                x = _Rows(targets[part], *(None if t is None else t[part, None] for t in (entropy, squares, *grads)))
                by_logits = _by_logits(z, x).mul_(slope)
                if kept is None:
                    dz = by_logits.to(weight.dtype)
                else:
                    kept[start - first : part.stop - first] = by_logits
            if kept is not None:
                dz = kept[: last - first]
            if d_hidden is not None:
                torch.mm(dz, weight, out=d_hidden[first:last])
            if d_weight is not None:
                _add_product(d_weight, dz, hidden[first:last])
            if d_bias is not None:
                d_bias += dz.sum(0)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(weight.dtype),
            *(None,) * 6,
        )


class _Rows(NamedTuple):
    """A chunk's targets [R], its entropy and sum of squares [R, 1], and the gradients by each of the results [R, 1]."""

    targets: Tensor
    entropy: Tensor | None
    squares: Tensor | None
    by_logprobs: Tensor | None
    by_entropy: Tensor | None
    by_squares: Tensor | None


def _slope(z: Tensor, form: LogitForm, temperature: Tensor) -> Tensor:
    """d z / d lm_head's output, [R, V] with a cap, else [R, 1]. z are the final logits over the temperature."""
    slope = form.scale / temperature[:, None].to(z)
    if form.softcap is None:
        return slope
    capped = z * temperature[:, None] / form.softcap
    return slope * (1 - capped * capped)


def _by_logits(logp: Tensor, x: _Rows) -> Tensor:
    """The gradient by the logits [R, V] from their log-probabilities, which are overwritten."""
    if x.by_entropy is None and x.by_squares is None:
        dz = logp.exp_()
        dz *= 0.0 if x.by_logprobs is None else -x.by_logprobs
    else:
        factor = torch.zeros_like(logp)
        if x.by_logprobs is not None:
            factor -= x.by_logprobs
        if x.by_entropy is not None and x.entropy is not None:
            factor -= x.by_entropy * (logp + x.entropy)
        p = logp.exp_()
        if x.by_squares is not None and x.squares is not None:
            factor += 2 * x.by_squares * (p - x.squares)
        dz = factor.mul_(p)
    if x.by_logprobs is not None:
        dz.scatter_add_(1, x.targets[:, None], x.by_logprobs)
    return dz


def _add_product(total: Tensor, dz: Tensor, hidden: Tensor) -> None:
    """total [V, H] += dz^T hidden, in the precision of ``total``."""
    if total.device.type != "cpu" and total.dtype != dz.dtype:
        torch.addmm(total, dz.t(), hidden, out_dtype=total.dtype, out=total)
        return
    with bfloat16_products(dz.dtype):
        total.addmm_(dz.t().to(total.dtype), hidden.to(total.dtype))


# --- Layers with a state

# Mamba 2, gated delta nets and short convolutions read a row of tokens from its start, so a packed row of several
# sequences would let each begin with the state of the one before. Equally long sequences stand side by side
# (``packing.Packed``) and are a view [sequences, length] of the row: one call of the layer serves each such group, as
# one of attention does, and every sequence begins with an empty state. That is so on every device; kernels that know
# borders need packages that Transformers finds itself.
#
# Over a tree of prefixes such a layer reads each row whole, since to copy a state at a branch would take code for each
# of Transformers' classes; everything else is computed once. Ranks that share a row all read the whole of it and keep
# the outputs of their tokens: each stores its part of what stands between layers, but the layer's own work is not
# divided.


def keep_rows_apart(lm: Any) -> None:
    """Let the modules that ``MIXERS`` names read the sequences of a packed row, a group of equal length at a time."""
    for mixer in mixers_of(lm):
        mixer.forward = partial(_by_rows, mixer.forward)


# A graph of torch.compile would have fixed groups.
@torch.compiler.disable
def _by_rows(
    forward: Callable[..., Tensor],
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    packed_row: RowCalls | None = None,
    packed_tree: TreeCalls | None = None,
    sharing_ranks: dist.ProcessGroup | None = None,
    **_: Any,
) -> Tensor:
    """Call a layer for the sequences of a packed row [1, N, H], or of a tree of them, one length at a time. Its result
    does not depend on other options. With ``sharing_ranks`` N are this rank's tokens, and so are those of the result.

    Raises ValueError for what is not a packed row, rather than compute it wrongly.
    """
    if (packed_row is None) == (packed_tree is None) or attention_mask is not None or cache is not None:
        raise ValueError("a layer with a state needs packed rows, without a mask and a cache")
    hidden = hidden_states[0]
    if packed_tree is not None:
        rows = [hidden.index_select(0, same.flatten()).unflatten(0, same.shape) for same in packed_tree.rows]
    else:
        assert packed_row is not None
        hidden = hidden if sharing_ranks is None else exchanged(hidden, sharing_ranks)
        sizes = [length * sequences for length, sequences in packed_row.groups]
        shapes = [(sequences, length) for length, sequences in packed_row.groups]
        rows = [part.unflatten(0, shape) for part, shape in zip(hidden.split(sizes), shapes, strict=True)]
    out = torch.cat([forward(same).flatten(0, 1) for same in rows])
    if packed_tree is not None:
        out = out.index_select(0, packed_tree.first)
    elif sharing_ranks is not None:
        out = out.chunk(sharing_ranks.size())[sharing_ranks.rank()]
    return out[None]


# --- Kernels


def why_prefixes_apart(config: Any, device: str, dtype: torch.dtype, options: TrainerConfig) -> str | None:
    """Why a model with this Hugging Face config computes shared prefixes once per row, or None."""
    if reason := why_padded(config):
        return f"its rows are not packed: {reason}"
    if options.sequence_parallel > 1:
        return "ranks that share rows (trainer.sequence_parallel) exchange whole ones"
    if device != "cpu" and not (dtype == torch.bfloat16 and has_flash_attention(torch.device(device))):
        return "attention over shared prefixes needs FlashAttention and bfloat16 on an accelerator"
    if options.kernels == "compile":
        return "compiled layers (trainer.kernels=compile) would be compiled anew for every tree of prefixes"
    return None


def attend_by_package(lm: Any, device: str, dtype: torch.dtype) -> None:
    """Have a model attend in packed rows with kernels of FlashAttention's package. Raises UserError if it cannot."""
    key = "model.override.attention=flash_attn"
    if reason := why_padded(lm.config):
        raise UserError(f"{key}: rows of this model are not packed: {reason}; leave it out")
    if dtype != torch.bfloat16 or not has_flash_attention(torch.device(device)):
        raise UserError(f"{key} needs model.dtype=bfloat16 and a GPU with FlashAttention, not {device}; leave it out")
    AttentionInterface.register(NAME_BY_PACKAGE, partial(packed_attention, by_package=package_kernel()))
    lm.set_attn_implementation({"text_config": NAME_BY_PACKAGE} if reads_images(lm.config) else NAME_BY_PACKAGE)


def apply_liger(lm: Any, device: str) -> None:
    """Let a Hugging Face model, or its decoder alone, compute with Liger's Triton kernels. Not its loss:
    log-probabilities come from ``token_stats``.

    Liger replaces the rotary embedding for all models of the kind in this process. Raises UserError without a
    GPU, without Liger, or if Liger does not know this kind of model.
    """
    if device == "cpu":
        raise UserError(f"trainer.kernels=liger needs a GPU, and the model is on {device}; use trainer.kernels=torch")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise UserError(
            "trainer.kernels=liger needs Liger, which is not installed; install it with `pip install 'rl-async[liger]'`"
        ) from error
    kind = lm.config.model_type
    # Liger itself would only log it.
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(f"trainer.kernels=liger: no kernels for models of type {kind}; use trainer.kernels=torch")
    _apply_liger_kernel_to_instance(model=lm, cross_entropy=False, fused_linear_cross_entropy=False)


# --- Router replay

# Kinds of models whose routers choose by softmax, and return logits, weights and experts.
REPLAYED = ("flex_olmo", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next")


def why_not_replayed(config: Any, *, packs: bool, compiled: bool) -> str | None:
    """Why the routers of a model with this Hugging Face config cannot replay records; None if they can."""
    if config.model_type not in REPLAYED:
        return f"routers of {config.model_type} choose in another way than those of {', '.join(REPLAYED)}"
    if not packs:
        return "its rows are padded, not packed"
    if compiled:
        return "layers are compiled (trainer.kernels=compile)"
    return None


def is_replayed(options: TrainerConfig, experts: int, reason: str | None) -> bool:
    """Whether a policy with so many ``experts`` replays those that engines chose, as ``trainer.router_replay`` says.

    ``reason`` is why its routers cannot; None if they can. Raises UserError if it must and cannot; with auto, warns of
    routers that cannot.
    """
    if not experts and options.router_replay != "always":
        return False
    reason = reason if experts else "the model has no experts"
    if options.router_replay == "always" and reason is not None:
        raise UserError(f"trainer.router_replay=always is not possible here: {reason}; use auto")
    if options.router_replay == "auto" and reason is not None:
        log.warning("the experts that engines choose are not replayed in training: %s", reason)
    return options.router_replay != "never" and reason is None


def check_records(experts: Tensor, config: Any) -> None:
    """Raise DataError unless records [B, T, layers, k], on the host, are of a model with this Hugging Face config."""
    shape, count, most = (config.num_hidden_layers, config.num_experts_per_tok), experts_of(config), int(experts.max())
    if tuple(experts.shape[2:]) != shape or most >= count:
        raise DataError(
            f"rows name experts up to {most} in [layers, experts per token] = {list(experts.shape[2:])}, and the model "
            f"has {count} in {list(shape)}; were they sampled with another model.path? trainer.router_replay=never "
            "ignores them"
        )


class RouterReplay:
    """Replays records in the routers of a decoder's layers, and measures how often their own choice agrees."""

    def __init__(self, lm: Any) -> None:
        # bool [N] of each layer, of a pass that has not ended.
        self._same: list[Tensor] = []
        self._counts = False
        for number, layer in enumerate(lm.base_model.layers):
            if getattr(layer.mlp, "gate", None) is not None:
                layer.forward = _ReplayingLayer(layer, number, self._note)

    def begin(self) -> None:
        """Begin a pass."""
        self._same, self._counts = [], True

    def end(self) -> Tensor:
        """End a pass; return the share of layers whose router agrees with the record's experts, float32 [N].

        The share of a token without a record is 1. Layers that are recomputed later are not counted again.
        """
        same, self._same, self._counts = self._same, [], False
        return torch.stack(same).float().mean(0)

    def _note(self, same: Tensor) -> None:
        if self._counts:
            self._same.append(same)


class _ReplayingLayer:
    """The forward pass of a layer whose router takes its experts from ``routed_experts`` [N, layers, k], if given.

    Tokens whose record is negative go where the router sends them.
    """

    def __init__(self, layer: Any, number: int, note: Callable[[Tensor], None]) -> None:
        self._layer_forward, self._router_forward = layer.forward, layer.mlp.gate.forward
        # Mixtral's router has no such attribute and always normalises.
        self._normalises = getattr(layer.mlp.gate, "norm_topk_prob", True)
        self._number, self._note = number, note
        self._record: Tensor | None = None
        layer.mlp.gate.forward = self._route

    def __call__(self, *arguments: Any, routed_experts: Tensor | None = None, **named: Any) -> Any:
        self._record = None if routed_experts is None else routed_experts[:, self._number]
        return self._layer_forward(*arguments, **named)

    def _route(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, own_weights, own = self._router_forward(hidden)
        if self._record is None:
            return logits, own_weights, own
        chosen = torch.where(self._record < 0, own, self._record.long())
        weights = logits.float().softmax(-1).gather(1, chosen)
        if self._normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        self._note((chosen.sort(-1).values == own.sort(-1).values).all(-1))
        return logits, weights.to(own_weights.dtype), chosen
