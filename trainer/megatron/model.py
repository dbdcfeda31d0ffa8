"""This rank's part of a Megatron-Core model: its place in each axis of parallelism, its layers, and their outputs.

Ranks are numbered as in Megatron-Core: tensor-parallel neighbours first, then those that share rows (its context
parallelism, ``trainer.sequence_parallel``), then data-parallel ones, pipeline stages last. Expert-parallel ranks are
ranks of a pipeline stage that divide the experts among themselves. Outputs come from logits whose vocabulary is split
over tensor-parallel ranks, which exchange a few numbers per token. The gradient of a sum over ranks reaches every rank
unchanged; a value that is equal on all ranks and enters their parts again sums the gradients of all (Megatron-LM,
arXiv:1909.08053, the functions f and g of section 3).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import UserError
from rl_async.trainer.attention import PackedAttention
from rl_async.trainer.backend import OutputName, Outputs
from rl_async.trainer.families import is_llama3, why_unsupported
from rl_async.trainer.megatron.mapping import Shape, config_key, padded_vocab
from rl_async.trainer.model import Head, ValueHead
from rl_async.trainer.ranks import DataParallel

# Megatron insists on a seed for its random state, which goes unused: all weights are read from files.
SEED = 1


@dataclass(frozen=True)
class Axis:
    """One kind of parallelism: number of ranks, this process's rank among them, and their process group."""

    size: int
    rank: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Parallel:
    """All axes of parallelism, as this process sees them.

    The ranks of ``context`` share each packed row. A pipeline stage has ``virtual_stages`` chunks of the model.
    """

    tensor: Axis
    context: Axis
    pipeline: Axis
    data: Axis
    expert: Axis
    virtual_stages: int

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def data_parallel(self) -> DataParallel:
        """The tensor- and pipeline-parallel processes that hold one copy of the model are one data-parallel rank, and
        so are all copies that share rows."""
        first = self.tensor.rank == self.context.rank == self.pipeline.rank == 0
        return DataParallel(self.data.rank, self.data.size, is_recorder=first, group=self.data.group)


def join_groups(config: TrainerConfig) -> Parallel:
    """Form Megatron's process groups, once per process. A collective of all ranks.

    Their collectives have the deadline ``trainer.collective_timeout_s``, as the trainer's own group has.
    """
    virtual = config.virtual_pipeline
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_parallel,
            context_parallel_size=config.sequence_parallel,
            pipeline_model_parallel_size=config.pipeline_parallel,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            expert_model_parallel_size=config.expert_parallel,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=config.collective_timeout_s / 60,
        )
        model_parallel_cuda_manual_seed(SEED)
    return Parallel(
        tensor=_axis(parallel_state.get_tensor_model_parallel_group()),
        context=_axis(parallel_state.get_context_parallel_group()),
        pipeline=_axis(parallel_state.get_pipeline_model_parallel_group()),
        data=_axis(parallel_state.get_data_parallel_group()),
        expert=_axis(parallel_state.get_expert_model_parallel_group()),
        virtual_stages=virtual,
    )


def _axis(group: dist.ProcessGroup) -> Axis:
    return Axis(group.size(), group.rank(), group)


# Megatron-Core 0.16.1 reads this name, but defines it only where Transformer Engine is installed.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None


def shape_of(hf: Any, path: str, head: Head = "policy") -> Shape:
    """Read the model's dimensions from a Hugging Face config. Raises UserError for a feature not supported here."""
    problem = why_unsupported(hf)
    if problem is not None:
        raise UserError(
            f"{config_key(head)}: {path} {problem}, which trainer.backend=megatron does not support; use fsdp2"
        )
    return Shape(
        layers=hf.num_hidden_layers,
        heads=hf.num_attention_heads,
        groups=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        vocab=hf.vocab_size,
        tied=hf.tie_word_embeddings and head != "value",
        qk_norm=hf.model_type in ("qwen3", "qwen3_moe"),
        qkv_bias=hf.model_type == "qwen2",
        experts=hf.num_experts if hf.model_type == "qwen3_moe" else 0,
        head=head,
    )


def require_divisible(shape: Shape, parallel: Parallel) -> None:
    """Raise UserError if the model's dimensions do not divide among the ranks."""
    tensor, stages = parallel.tensor.size, parallel.pipeline.size * parallel.virtual_stages
    sharing = parallel.context.size
    problems = {
        f"its {shape.heads} heads and {shape.groups} key-value heads do not divide among "
        f"trainer.tensor_parallel={tensor}": bool(shape.heads % tensor or shape.groups % tensor),
        f"its {shape.heads} heads do not divide among {tensor * sharing} ranks: trainer.tensor_parallel={tensor} times "
        f"trainer.sequence_parallel={sharing}": bool(shape.heads % (tensor * sharing)),
        f"its {shape.layers} layers do not divide among {stages} stages (trainer.pipeline_parallel * "
        "trainer.virtual_pipeline)": bool(shape.layers % stages),
        f"its {shape.experts} experts do not divide among trainer.expert_parallel={parallel.expert.size}": bool(
            shape.experts % parallel.expert.size or (not shape.experts and parallel.expert.size > 1)
        ),
        f"it has experts, and trainer.tensor_parallel={tensor} then needs a trainer.expert_parallel above 1, since "
        "tensor-parallel ranks divide the tokens among them": bool(
            shape.experts and tensor > 1 and parallel.expert.size == 1
        ),
    }
    for problem, found in problems.items():
        if found:
            raise UserError(f"{config_key(shape.head)}: {problem}")


def transformer_config(
    hf: Any, shape: Shape, parallel: Parallel, dtype: torch.dtype, *, on_cpu: bool
) -> TransformerConfig:
    """Return Megatron's config of a model that computes in ``dtype``: no dropout, no fused kernels."""
    sparse: dict[str, Any] = {}
    if shape.experts:
        sparse = {
            "num_moe_experts": shape.experts,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_dtype": "fp32",
            "moe_router_pre_softmax": not hf.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": parallel.expert.size,
            "expert_tensor_parallel_size": 1,
        }
    stages = parallel.pipeline.size
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=hf.intermediate_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=on_cpu,
        # Without it parameters are not marked as sharded, and the gradient norm omits shards.
        perform_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        tensor_model_parallel_size=parallel.tensor.size,
        context_parallel_size=parallel.context.size,
        sequence_parallel=shares_tokens(shape, parallel),
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=parallel.virtual_stages if parallel.virtual_stages > 1 else None,
        moe_token_dispatcher_type="alltoall",
        # Micro-batches differ in their number of tokens.
        variable_seq_lengths=stages > 1,
        # Gradients are then summed, as they must be: the loss is already divided by the global count.
        calculate_per_token_loss=True,
        **sparse,
    )


def shares_tokens(shape: Shape, parallel: Parallel) -> bool:
    """Return whether tensor-parallel ranks hold a part of the tokens each between layers' products (sequence
    parallelism), as Megatron-Core asks of experts: each token is then dispatched once."""
    return bool(shape.experts) and parallel.tensor.size > 1


def build_chunks(hf: Any, shape: Shape, config: TransformerConfig, parallel: Parallel) -> list[Any]:
    """Build this rank's parts of the model, one per virtual stage, without loading weights."""
    rope = hf.rope_parameters
    last = parallel.virtual_stages - 1
    chunks = [
        GPTModel(
            config=config,
            transformer_layer_spec=_block_spec(shape, config, chunk if last else None),
            vocab_size=padded_vocab(shape.vocab, parallel.tensor.size),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel.pipeline.rank == 0 and chunk == 0,
            post_process=parallel.is_last_stage and chunk == last,
            # No rank ever holds the logits of the whole vocabulary.
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_base=rope["rope_theta"],
            rope_scaling=is_llama3(rope),
            rope_scaling_factor=rope.get("factor", 1.0),
            vp_stage=chunk if last else None,
        )
        for chunk in range(parallel.virtual_stages)
    ]
    if shape.has_values and parallel.is_last_stage:
        add_value_head(chunks[-1], shape.head, config, parallel.tensor)
    return chunks


class Norm(torch.nn.RMSNorm):
    """RMSNorm in the form of a norm of Megatron-Core's layers, whose own refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        """Take the arguments that Megatron-Core builds it with; the rest are not needed here."""
        super().__init__(hidden_size, eps=eps)
        # Each rank's gradient is then that of its tokens, and Megatron-Core sums it over tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _block_spec(shape: Shape, config: TransformerConfig, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """Return Megatron's local layers with ``PackedAttention``, since its own refuses packed rows, and ``Norm``."""
    spec = get_gpt_layer_local_spec(
        num_experts=shape.experts or None, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    count = get_num_layers_to_build(config, virtual_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=Norm)


def vocab_parallel_outputs(
    logits: Tensor, chosen: Tensor, requested: frozenset[OutputName], tensor: Axis, vocabulary: int
) -> Outputs:
    """Compute outputs [N], equal on all ranks of ``tensor``, from this rank's columns of the logits, [N, V / ranks].

    ``chosen``, int64 [N], are the tokens that follow. Columns beyond ``vocabulary`` are padding and have probability 0.
    """
    first = tensor.rank * logits.shape[1]
    padding = first + torch.arange(logits.shape[1], device=logits.device) >= vocabulary
    logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
    largest = logits.detach().amax(1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tensor.group)
    logits = logits - largest[:, None]
    normaliser = _sum(logits.exp().sum(1), tensor).log()
    logprobs = _sum(_pick(logits, chosen - first), tensor) - normaliser
    if not requested:
        return Outputs(logprobs)
    distribution = logits - mappings.copy_to_tensor_model_parallel_region(normaliser, group=tensor.group)[:, None]
    # Finite, so that below its exponential, which is 0, times itself is 0 and not NaN.
    distribution = distribution.masked_fill(padding, torch.finfo(logits.dtype).min / 4)
    return Outputs(
        logprobs=logprobs,
        entropy=-_sum((distribution.exp() * distribution).sum(1), tensor) if "entropy" in requested else None,
        sum_squares=_sum((2 * distribution).exp().sum(1), tensor) if "sum_squares" in requested else None,
    )


def _pick(logits: Tensor, column: Tensor) -> Tensor:
    """Return the logit in each row's column, [N]; 0 where another rank holds it."""
    mine = (column >= 0) & (column < logits.shape[1])
    picked = logits.gather(1, torch.where(mine, column, 0)[:, None]).squeeze(1)
    return torch.where(mine, picked, 0.0)


def _sum(part: Tensor, tensor: Axis) -> Tensor:
    return mappings.reduce_from_tensor_model_parallel_region(part, group=tensor.group)


class ParallelValueHead(ValueHead):
    """A value head, whole on every rank of the last stage. It keeps the values of the last pass for ``take``.

    Its input are hidden states of Megatron-Core's layers, [N, 1, H], or with sequence parallelism a part of the tokens.
    Each rank's gradient of the head is then that of its tokens, and Megatron-Core sums it over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, tensor: Axis) -> None:
        super().__init__(config.hidden_size)
        self._shares, self._group = config.sequence_parallel, tensor.group
        self._kept: Tensor | None = None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def keep(self, hidden: Tensor) -> None:
        """Compute the values of these tokens, with gradient if the pass has one."""
        values = self(hidden)[:, 0]
        if self._shares:
            values = mappings.gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self._group
            )
        self._kept = values.float()

    def take(self) -> Tensor:
        """Return the values of the last pass, float32 [N] on every rank, and forget them."""
        assert self._kept is not None
        values, self._kept = self._kept, None
        return values


class NoLogits(torch.nn.Module):
    """Stands in for Megatron-Core's output layer where there are values alone."""

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return logits of no vocabulary, [N, 1, 0]."""
        return hidden[..., :0], None


def add_value_head(chunk: Any, head: Head, config: TransformerConfig, tensor: Axis) -> None:
    """Give the last part of a model a value head, ``output_layer.value_head``, beside its logits or in their place."""
    if head == "value":
        chunk.output_layer = NoLogits()
    value_head = chunk.output_layer.value_head = ParallelValueHead(config, tensor)
    chunk.output_layer.register_forward_pre_hook(lambda _, inputs: value_head.keep(inputs[0]))
