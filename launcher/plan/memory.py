"""Estimates the memory of each role, and budgets each device by process and stage of a step. Pure functions.

    start    engines and trainer ranks load; the first weights are gathered
    rollout  engines sample
    train    the trainer steps
    gather   the new weights are copied, in the type that travels
    load     engines take the copy

``--dry-run`` shows the estimates, to catch a run that is ten times too large. Where engines and trainer take turns,
engines sleep while the trainer works (train, gather), and its models are off the device in the other stages; the
weights that each rank sends stay there until engines have loaded them, and leave before the engines' caches wake. In
other modes an engine holds its working memory at all times, except that an embedded one starts without a cache. A
trainer on a GPU keeps the memory of a step from the first step on, since torch does not return it; on a CPU it only
holds it while it trains.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec

from rl_async.configs.checks import data_parallel
from rl_async.configs.derived import (
    adapter_way,
    engine_kinds,
    reference_is_base,
    resolve_transport,
    sends_shards,
    warm_start_of,
)
from rl_async.configs.engines import ENGINES, most_static_steps
from rl_async.configs.schema.data import WarmStartConfig
from rl_async.configs.schema.reward import RewardModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import UserError
from rl_async.model_files import experts_of, read_object
from rl_async.process.run_files import DeviceBudget, Holder, MemoryBudget, Part, Stage
from rl_async.weight_sync.layout import LEAST_NUMBERS, in_blocks, sharded_dimension

# vLLM's attention on the CPU refuses heads of 16.
HEAD_DIM = 32
# Pixels of a side of a patch that a tiny model's vision tower reads; 2 x 2 patches are a token.
TINY_PATCH = 8
# An agent worker or the queue: interpreter, tokenizer, numpy.
PYTHON_BYTES = 120 << 20
# Keys of ``config.json`` that estimates count with.
SIZES = frozenset(
    (
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "num_experts",
        "n_routed_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "n_shared_experts",
        "first_k_dense_replace",
        # Of multi-head latent attention.
        "kv_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        # Of vision towers.
        "depth",
        "patch_size",
        "temporal_patch_size",
        "spatial_merge_size",
        "image_size",
        "mm_tokens_per_image",
        "scale_factor",
    )
)
MOST_SIZE = 1 << 40
# A process that has imported torch and transformers.
TORCH_BYTES = 450 << 20
# Logits in memory at once on a CPU. A GPU holds 8 times as many, which is little beside its other contents.
LOGITS_CHUNK = 1 << 23
# Each weight of the last layer is held gathered, with its gradient as computed, as cast and as reduced.
HEAD_BYTES = 12
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Every process that uses a GPU takes this much of it for the driver, workspaces of libraries, and collectives.
CONTEXT_BYTES = 1 << 30
# A CUDA graph of a decode step, beside the memory that it works in: vLLM's take 12 MiB for models of 30 layers.
GRAPH_BYTES = 16 << 20
# A token of a step's batch takes at most this many bytes on each rank's host (``benchmarks.batches``).
BATCH_BYTES = 240
# The embedded engine prefills at most this many tokens in one pass, and vLLM fewer.
PREFILL_TOKENS = 32_768


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model, in elements: its weights and its KV cache per token."""

    parameters: int
    kv_per_token: int
    # The weights of a separate critic.
    critic: int = 0
    # Kept of each token for the backward pass, also if layers are checkpointed, whole or selectively.
    activations: int = 0
    checkpointed: int = 0
    selected: int = 0
    vocab: int = 0
    # The weights of the last layer.
    head: int = 0
    # The number of experts in a layer.
    experts: int = 0
    # Needed of a token in one layer without a backward pass.
    layer: int = 0
    # The weights of the layers' matrices, which rollout.quantization rounds and Muon trains, and of the critic's.
    matrices: int = 0
    critic_matrices: int = 0
    # The shapes of the weights, of the policy's decoder and of the critic, with how often each occurs.
    shapes: tuple[tuple[tuple[int, ...], int], ...] = ()
    critic_shapes: tuple[tuple[tuple[int, ...], int], ...] = ()
    # The weights in experts, of the policy and of the critic, and those in experts that a token does not pass through.
    in_experts: int = 0
    critic_in_experts: int = 0
    idle: int = 0
    # The weights of teachers beside the trainer, and those in their experts.
    teacher: int = 0
    teacher_in_experts: int = 0
    # The weights of a vision tower and its projector, which ``parameters`` includes, and the tower's counterparts of
    # ``activations``, ``checkpointed`` and ``layer`` for each token of an image.
    tower: int = 0
    tower_activations: int = 0
    tower_checkpointed: int = 0
    tower_layer: int = 0


def model_size(config: RunConfig) -> ModelSize | None:
    """Return the sizes of the run's policy, which its warm start may have to make, of its critic and its teachers.

    Returns None if they are unknown. Raises UserError for a ``config.json`` that cannot be read.
    """
    policy = _policy_size(config)
    for key, path in config.algorithm.teacher.paths.items() if config.algorithm.teacher else ():
        taught_by = _read_size(key, Path(path))
        if policy is None or taught_by is None:
            return None
        policy = replace(
            policy,
            teacher=policy.teacher + taught_by.parameters,
            teacher_in_experts=policy.teacher_in_experts + taught_by.in_experts,
        )
    if policy is None or config.critic is None or config.critic.shared:
        return policy
    critic = policy if config.critic.path is None else _read_size("critic.path", Path(config.critic.path))
    if critic is None:
        return None
    return replace(
        policy,
        critic=critic.parameters,
        critic_matrices=critic.matrices,
        critic_shapes=critic.shapes,
        critic_in_experts=critic.in_experts,
    )


def read_shape(key: str, folder: Path) -> dict[str, Any] | None:
    """Return the ``config.json`` of the model, or saved critic, in ``folder``; None if it has none.

    Raises UserError, naming the key, unless the file holds a JSON object whose sizes are whole numbers.
    """
    saved = folder / "model" / "config.json"
    file = saved if saved.is_file() else folder / "config.json"
    if not file.is_file():
        return None
    shape = read_object(file, key)
    parts = {name: shape.get(name, {}) for name in ("text_config", "vision_config")}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise UserError(f"{key}: {file}: {name} must be an object, not {part!r:.80}")
    for name, value in (*shape.items(), *(pair for part in parts.values() for pair in part.items())):
        # Hugging Face writes null for a size that follows from others.
        if name in SIZES and value is not None and (type(value) is not int or not 0 <= value <= MOST_SIZE):
            raise UserError(f"{key}: {file}: {name} must be a whole number from 0 to {MOST_SIZE}, not {value!r:.80}")
    return shape


def _read_size(key: str, folder: Path) -> ModelSize | None:
    shape = read_shape(key, folder)
    return None if shape is None else size_of(shape)


def _policy_size(config: RunConfig) -> ModelSize | None:
    folder = Path(config.model.path)
    if (folder / "config.json").is_file():
        return _read_size("model.path", folder)
    makes = warm_start_of(config)
    if makes is None:
        return None
    if makes.pretrained is not None:
        return _read_size("warm_start.pretrained.path", Path(makes.pretrained.path))
    return size_of(
        {**tiny_shape(makes), "vocab_size": makes.vocab_size, "tie_word_embeddings": True}
        | ({"model_type": "qwen2_5_vl", "vision_config": tiny_tower(makes)} if makes.vision else {})
    )


def tiny_shape(settings: WarmStartConfig) -> dict[str, Any]:
    """Return the sizes of the model that a warm start makes, by the names of Hugging Face's configs."""
    # The heads of a Qwen2.5-VL divide its width.
    heads = max(2, settings.hidden_size // (HEAD_DIM if settings.vision else 16))
    inner = 3 * settings.hidden_size
    experts = {"num_experts": settings.experts, "num_experts_per_tok": 2, "moe_intermediate_size": inner // 2}
    return (experts if settings.experts else {}) | {
        "hidden_size": settings.hidden_size,
        "intermediate_size": inner,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": HEAD_DIM,
    }


def tiny_tower(settings: WarmStartConfig) -> dict[str, Any]:
    """Return the sizes of the vision tower of the model that a warm start makes."""
    hidden = settings.hidden_size
    return {
        "depth": 2,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_heads": tiny_shape(settings)["num_attention_heads"],
        "out_hidden_size": hidden,
        "patch_size": TINY_PATCH,
    }


def size_of(model: dict[str, Any]) -> ModelSize | None:
    """Return the size from the usual keys of a model's ``config.json``; None if they are missing.

    A vision tower counts. The keys of a vision-language model's decoder are in ``text_config``, or in older files
    beside ``vision_config``.
    """
    if "vision_config" in model:
        tied = "tie_word_embeddings"
        text = {name: value for name, value in model.items() if name not in ("text_config", "vision_config")}
        decoder = size_of(text | model.get("text_config", {}) | ({tied: model[tied]} if tied in model else {}))
        return None if decoder is None else _with_tower(decoder, model)
    if not {"hidden_size", "num_hidden_layers", "vocab_size"} <= model.keys():
        return None
    hidden, layers, vocab = model["hidden_size"], model["num_hidden_layers"], model["vocab_size"]
    heads = model.get("num_attention_heads") or 1
    kv_heads = model.get("num_key_value_heads") or heads
    head_dim = model.get("head_dim") or hidden // heads
    experts = experts_of(SimpleNamespace(**model))
    one = (experts and model.get("moe_intermediate_size")) or model.get("intermediate_size") or 4 * hidden
    # DeepSeek's first layers are dense, and all tokens also pass through its shared experts.
    sparse = layers - min(layers, model.get("first_k_dense_replace") or 0) if experts else 0
    chosen, shared = (model.get("num_experts_per_tok") or 1) * one, (model.get("n_shared_experts") or 0) * one
    # A token passes through this many of an MLP's hidden units.
    inner = chosen + shared if experts else one
    embeddings = vocab * hidden * (1 if model.get("tie_word_embeddings") else 2)
    if latent := model.get("kv_lora_rank"):
        # Multi-head latent attention (arXiv:2405.04434, section 2.1); engines cache the latent vector and rotary key.
        rotary, value, rank = model["qk_rope_head_dim"], model["v_head_dim"], model.get("q_lora_rank")
        queries = keys = heads * (model["qk_nope_head_dim"] + rotary)
        attention = [(rank, hidden), (queries, rank)] if rank else [(queries, hidden)]
        attention += [(latent + rotary, hidden), (heads * (model["qk_nope_head_dim"] + value), latent)]
        attention += [(hidden, heads * value)]
        cached = latent + rotary
    else:
        queries, keys = heads * head_dim, kv_heads * head_dim
        attention, cached = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)], 2 * keys
    layer = 6 * hidden + 5 * queries + 4 * keys + 4 * inner
    in_experts = sparse * 3 * hidden * one * experts
    dense = (model.get("intermediate_size") or one) if experts else one
    occur: list[tuple[tuple[int, ...], int]] = [(shape, layers) for shape in attention]
    occur += [((experts, 2 * one, hidden), sparse), ((experts, hidden, one), sparse)]
    for width, number in ((shared, sparse), (dense, layers - sparse)):
        occur += [((width, hidden), 2 * number), ((hidden, width), number)]
    matrices = sum(math.prod(shape) * number for shape, number in occur)
    occur += [((vocab, hidden), 1 if model.get("tie_word_embeddings") else 2)]
    return ModelSize(
        parameters=embeddings + sparse * hidden * experts + matrices,
        kv_per_token=layers * cached,
        activations=(layers + 1) * layer + 4 * hidden,
        checkpointed=layers * hidden + 2 * layer + 4 * hidden,
        selected=layers * (3 * hidden + 2 * queries + 2 * keys + 2 * inner) + 2 * layer + 4 * hidden,
        vocab=vocab,
        head=vocab * hidden,
        experts=experts,
        layer=2 * hidden + max(queries + 2 * keys, 3 * inner),
        matrices=matrices,
        shapes=tuple((shape, number) for shape, number in occur if number and math.prod(shape)),
        in_experts=in_experts,
        idle=in_experts - sparse * 3 * hidden * chosen,
    )


def _with_tower(decoder: ModelSize, model: dict[str, Any]) -> ModelSize | None:
    """Add a vision tower to the size of its decoder; None if keys are missing.

    A token of an image stands for a square of patches, which the projector joins: ``spatial_merge_size`` of them a side
    in the Qwen family, ``scale_factor`` in Idefics3, and as many as leave ``mm_tokens_per_image`` in Gemma 3.
    """
    vision, kind = model["vision_config"], model.get("model_type", "")
    text = model.get("text_config") or model
    qwen, depth = kind.startswith("qwen"), vision.get("depth") or vision.get("num_hidden_layers")
    if not depth or not {"hidden_size", "intermediate_size", "patch_size"} <= vision.keys():
        return None
    width, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    if qwen:
        side = vision.get("spatial_merge_size", 2)
        joined = side**2 * width
        # One projector, and one for each layer whose features Qwen3-VL adds.
        mergers = 1 + (len(vision.get("deepstack_visual_indexes", ())) if kind != "qwen2_5_vl" else 0)
        projector = mergers * joined * (joined + vision.get("out_hidden_size", text["hidden_size"]))
        patches = side**2
    elif "mm_tokens_per_image" in model:
        projector = width * text["hidden_size"]
        patches = (vision.get("image_size", 0) // patch) ** 2 // model["mm_tokens_per_image"]
    else:
        patches = model.get("scale_factor", 2) ** 2
        projector = patches * width * text["hidden_size"]
    # Qwen2.5-VL gates its MLPs.
    products = 3 if kind == "qwen2_5_vl" else 2
    embedding = 3 * vision.get("temporal_patch_size", 2 if qwen else 1) * patch**2 * width
    positions = 0 if qwen else (vision.get("image_size", 0) // patch) ** 2 * width
    tower = depth * (4 * width**2 + products * width * inner) + embedding + positions + projector
    # As in a decoder's layer with as many key heads as heads, for each patch.
    layer = 6 * width + 9 * width + (products + 1) * inner
    return replace(
        decoder,
        parameters=decoder.parameters + tower,
        tower=tower,
        tower_activations=patches * (depth + 1) * layer,
        tower_checkpointed=patches * (depth * width + 2 * layer),
        tower_layer=patches * (2 * width + max(3 * width, products * inner)),
    )


def trainer_bytes(config: RunConfig, size: ModelSize | None) -> int | None:
    """Estimate one trainer rank in a step: the sum of ``trainer_parts`` on a CPU."""
    return None if size is None else sum(trainer_parts(config, size, on_gpu=False).values())


def trainer_parts(config: RunConfig, size: ModelSize, *, on_gpu: bool) -> dict[Part, int]:
    """Estimate one trainer rank in a step, in bytes: its shard of the float32 weights, gradients and AdamW moments of
    policy and critic, its shards of reference and teacher, and the activations of a forward pass over rows of maximal
    length.

    The last layer and its gradient are gathered whole: beside its shard, a rank holds the weights, their gradient in
    float32 and in the model's dtype, and the reduced gradient. When several FSDP ranks split a mini-batch into
    micro-batches, each keeps the sum of whole gradients until the last one (``Fsdp2Backend.add_gradients``). A single
    rank keeps its sum in place of the reduced gradient, and the gathered weights, in float32 at most.

    Megatron's data-parallel ranks shard only the moments and the float32 masters of bfloat16 weights, and hold the
    reference in the model's type; ``expert_parallel`` of them divide the experts. FSDP's ranks shard their whole
    replica. With ``cpu_offload`` a GPU has none of the shards. LoRA adapters are not counted, but their frozen base is;
    a frozen vision tower has neither gradients nor moments. The per-token numbers of the whole batch are on the host of
    each rank (``trainer/batches.py``).
    """
    trainer = config.trainer
    sharded = trainer.ranks // trainer.replicas
    whole = size.critic if trainer.lora else size.parameters + size.critic
    still = size.tower if trainer.vision_learning_rate == 0 and not trainer.lora else 0
    frozen = size.parameters * DTYPE_BYTES[config.model.dtype] // sharded if trainer.lora else 0
    megatron, each = trainer.backend == "megatron", DTYPE_BYTES[config.model.dtype]
    masters = whole * 4 // sharded if megatron and each < 4 else 0

    def held(weights: int, in_experts: int) -> int:
        if not megatron:
            return weights // sharded
        dense = (weights - in_experts) // (trainer.tensor_parallel * trainer.pipeline_parallel)
        return dense + in_experts // (trainer.expert_parallel * trainer.pipeline_parallel)

    # Muon keeps one moment of each weight, and AdamW in 8 bits a byte of each, and a float32 scale for 256, but of
    # matrices that ranks do not divide into whole blocks float32 numbers. A vision tower's are taken to be divided so.
    muon = size.matrices + size.critic_matrices if trainer.optimizer == "muon" else 0
    moment = 4 / 256 + 1 if trainer.optimizer == "adamw_8bit" else 4
    shapes = (*(() if trainer.lora else size.shapes), *size.critic_shapes)
    plain = sum(
        math.prod(shape) * number
        for shape, number in shapes
        if math.prod(shape) < LEAST_NUMBERS or not in_blocks(shape, sharded, sharded_dimension(shape, sharded))
    )
    own = held(whole, size.critic_in_experts + (0 if trainer.lora else size.in_experts))
    reference = held(size.parameters, size.in_experts) * (each if megatron else 4)
    teacher = held(size.teacher, size.teacher_in_experts) * (each if megatron else 4)
    has_reference = config.algorithm.uses_reference and not reference_is_base(config, experts=size.in_experts > 0)
    several = trainer.ranks > 1 and _tokens_of_rank(config) > trainer.max_tokens_per_microbatch
    summed = (whole - still) * 4 if several or trainer.ranks == 1 else 0
    gathered = 0 if megatron else size.head * HEAD_BYTES + summed
    shards: dict[Part, int] = {
        "weights": frozen + masters + own * (each if megatron else 4),
        "reference": reference if has_reference else 0,
        "teacher": teacher,
        "optimizer": int((whole - still) * moment * 2 + plain * (4 - moment) * 2 - muon * 4) // sharded,
        "gradients": (own - still // sharded) * 4,
    }
    if on_gpu and trainer.cpu_offload:
        shards = dict.fromkeys(shards, 0)
    shards["gradients"] += gathered
    runtime = CONTEXT_BYTES if on_gpu else TORCH_BYTES
    rows = config.data.train_batch_groups * config.rollout.group_size
    return {
        "runtime": runtime,
        **shards,
        "activations": forward_bytes(config, size, on_gpu=on_gpu),
        "batch": 0 if on_gpu else rows * config.rollout.max_model_len * BATCH_BYTES,
    }


def forward_bytes(config: RunConfig, size: ModelSize, *, on_gpu: bool) -> int:
    """Estimate the activations of one micro-batch.

    A layer keeps its residual stream, normalised and not (6 hidden sizes), its queries before and after norm and
    rotation and the attention output (5), keys (3) and values (1), and the four parts of a gated MLP; the gradients of
    one layer take as much again. With activation checkpointing a layer only keeps its input, or selectively also the
    results of its seven products and of attention, and one layer at a time keeps everything. Logits exist for one chunk
    of tokens (``trainer/model.py``), twice. Ranks that share rows hold an
    equal part of the tokens each; around attention they hold whole rows of a part of the heads.

    Rows are distributed over the replicas of the model. The estimate ignores that Megatron's other ranks divide the
    layers of a row, that a token may pass through several experts, and that key heads may be copied to several ranks.
    Prompts for a model with a vision tower are taken to be images and of data.max_prompt_tokens.
    """
    row = min(_tokens_of_rank(config), max(config.trainer.max_tokens_per_microbatch, config.rollout.max_model_len))
    tokens = -(-row // config.trainer.sequence_parallel)
    logits = min(tokens * size.vocab, LOGITS_CHUNK * (8 if on_gpu else 1)) * 4 * 2
    checkpoints, trainer = config.trainer.activation_checkpointing, config.trainer
    kept = size.checkpointed if checkpoints else size.activations
    if checkpoints == "selective":
        kept = size.selected
    seen = size.tower_checkpointed if checkpoints else size.tower_activations
    if trainer.lora or trainer.vision_learning_rate == 0:
        seen = size.tower_layer
    shown = tokens * min(config.data.max_prompt_tokens, config.rollout.max_model_len) // config.rollout.max_model_len
    return (tokens * kept + shown * seen) * DTYPE_BYTES[config.model.dtype] + logits


def _tokens_of_rank(config: RunConfig) -> int:
    """Return the most tokens that a data-parallel rank may get in a mini-batch."""
    rows = -(-config.data.train_batch_groups * config.rollout.group_size // config.trainer.minibatches)
    return -(-rows // data_parallel(config)) * config.rollout.max_model_len


def engine_bytes(config: RunConfig, size: ModelSize | None, *, on_gpu: bool = False) -> int | None:
    """Estimate an engine, all its ranks together: weights, their host copy if updates need one, and a KV cache.

    On a CPU an embedded engine also holds its last layer in float32. It loads all weights before it quantises any. The
    cache on a GPU is taken to hold a full batch of sequences of maximal length, even if the device has less room.
    """
    if size is None:
        return None
    sync, rollout, each = config.weight_sync, config.rollout, DTYPE_BYTES[config.model.dtype]
    embedded = set(engine_kinds(config)) == {"embedded"}
    # For deltas and adapters to add, each rank holds whole tensors.
    copies = rollout.ranks if sync.delta or adapter_way(config) == "add" else sync.staged
    output = size.head * 4 if embedded and each < 4 and not on_gpu else 0
    cache = cache_bytes(config, size, embedded=embedded, on_gpu=on_gpu) * rollout.ranks
    travels = size.parameters * each
    works = held_bytes(config, size) * rollout.data_parallel + copies * travels + output + cache
    return rollout.ranks * TORCH_BYTES + (max(works, travels + output) if embedded else works)


def held_bytes(config: RunConfig, size: ModelSize) -> int:
    """Return the bytes of an engine's weights, all ranks together: one per quantised weight, ignoring the scales."""
    rounded = size.matrices if config.rollout.quantization != "none" else 0
    return (size.parameters - rounded) * DTYPE_BYTES[config.model.dtype] + rounded


def cache_bytes(config: RunConfig, size: ModelSize, *, embedded: bool, on_gpu: bool) -> int:
    """Return the size of the KV cache of an engine's rank if there is room for it.

    On a GPU it is ``rollout.cache_bytes`` or, by default, the need of ``rollout.max_batch_size`` sequences of maximal
    length; on a CPU it is ``rollout.cpu_cache_bytes``. An embedded engine allocates on demand, at most twice the need
    of those sequences, since it keeps prefixes.
    """
    rollout = config.rollout
    full = rollout.max_batch_size * rollout.max_model_len * size.kv_per_token * DTYPE_BYTES[config.model.dtype]
    most = full * (2 if embedded else 1) // rollout.ranks
    given = rollout.cache_bytes if on_gpu else rollout.cpu_cache_bytes
    if given is None:
        return most
    return min(most, given) if embedded else given


def decoding_bytes(config: RunConfig, size: ModelSize) -> int:
    """Estimate the activations of an engine on a GPU: those of one layer for the tokens of a prefill or for an image as
    long as a prompt, and the logits of a batch, sorted and unsorted."""
    rollout, each = config.rollout, DTYPE_BYTES[config.model.dtype]
    tokens = min(rollout.max_batch_size * rollout.max_model_len, PREFILL_TOKENS)
    shown = min(config.data.max_prompt_tokens, rollout.max_model_len)
    # Images are computed before the prompts, one at a time.
    layers = max(tokens * size.layer // rollout.tensor_parallel, shown * size.tower_layer)
    return layers * each + rollout.max_batch_size * size.vocab * 4 * 3


def queue_bytes(config: RunConfig) -> int:
    """Estimate the queue. It holds payloads only if its journal is in memory and there are no shards."""
    own = config.queue.journal == "memory" and not config.queue.shards
    return PYTHON_BYTES + (config.queue.max_bytes if own else 0)


def shard_bytes(config: RunConfig) -> int:
    """Estimate one payload shard: its part of queue.max_bytes, replicas included."""
    return PYTHON_BYTES + config.queue.max_bytes * config.queue.replicas // max(1, config.queue.shards)


def worker_bytes(config: RunConfig) -> int:
    """Estimate one agent worker together with its scorer processes."""
    return PYTHON_BYTES * (1 + config.reward.processes)


def reward_model_bytes(model: RewardModelConfig) -> int | None:
    """Estimate the reward model: its weights, without activations."""
    size = _read_size("reward.model.path", Path(model.path))
    return None if size is None else TORCH_BYTES + size.parameters * DTYPE_BYTES[model.dtype]


STAGES: tuple[Stage, ...] = get_args(Stage)
CPU = "cpu"
_KEPT_ASLEEP: frozenset[Part] = frozenset({"runtime", "published", "bucket"})
_BETWEEN_STEPS: frozenset[Part] = frozenset(
    {"runtime", "weights", "reference", "teacher", "optimizer", "published", "bucket"}
)
_Stages = dict[Stage, dict[Part, int]]


@dataclass(frozen=True)
class Place:
    """Where a process computes: its GPUs, one for each rank, or the CPU if there are none.

    ``turns`` says whether it takes turns there with processes of the other role, ``kind`` names that of an engine, and
    ``opens`` are further GPUs, from whose trainer ranks an engine maps weights.
    """

    process: str
    gpus: tuple[int, ...]
    turns: bool
    kind: str = ""
    opens: tuple[int, ...] = ()


@dataclass(frozen=True)
class EngineMemory:
    """Memory limits of an engine's rank, as its flags take them; without a limit the engine takes the free memory.

    ``share`` is the part of the whole device for everything, ``static_share`` that for weights and cache.
    """

    cache_bytes: int | None = None
    share: float | None = None
    static_share: float | None = None


def memory_budget(
    config: RunConfig, size: ModelSize, engines: Sequence[Place], trainers: Sequence[Place], capacity: int | None
) -> MemoryBudget:
    """Return the budgets of all devices, which have ``capacity`` bytes each if it is known.

    KV caches of engines on GPUs shrink to the memory left by the others. Raises UserError, naming the largest part and
    the key to change, for a device that lacks memory in some stage.
    """
    limit = None if capacity is None else int(capacity * config.launcher.device_memory)
    held: dict[str, list[Holder]] = {}
    for place in trainers:
        holder = Holder(place.process, "trainer", _trainer(config, size, place))
        held.setdefault(_devices(place)[0], []).append(holder)
    for place in engines:
        for device in (_devices(place) * config.rollout.ranks)[: config.rollout.ranks]:
            held.setdefault(device, []).append(Holder(place.process, "engine", _engine(config, size, place)))
    found = (DeviceBudget(device, capacity, limit, tuple(holders)) for device, holders in held.items())
    return MemoryBudget(tuple(_checked(_with_room(budget, config, size), config) for budget in found))


def engine_memory(budget: MemoryBudget, config: RunConfig, place: Place) -> EngineMemory:
    """Return the limits for an engine. An engine of other software that has a GPU to itself measures its own."""
    given, found = config.rollout.cache_bytes, budget.of(place.process)
    if not place.gpus:
        return EngineMemory(config.rollout.cpu_cache_bytes)
    if found is None:
        return EngineMemory(given)
    device, holder = found
    if given is None and len(device.holders) == 1 and ENGINES[place.kind].package:
        return EngineMemory()
    awake, most = holder.stages["rollout"], max(map(holder.total, STAGES))

    def share(nbytes: int) -> float | None:
        return None if device.capacity is None else math.ceil(10_000 * nbytes / device.capacity) / 10_000

    return EngineMemory(awake["KV cache"], share(most), share(awake["weights"] + awake["KV cache"]))


def _devices(place: Place) -> tuple[str, ...]:
    return tuple(f"gpu:{gpu}" for gpu in place.gpus) or (CPU,)


def _trainer(config: RunConfig, size: ModelSize, place: Place) -> _Stages:
    """Estimate a trainer rank in each stage.

    A rank keeps the weights that it publishes for late engines: its own shard, or all of them on a rank 0 that gathers.
    With ipc and nccl they are on the GPU, and for ipc so are two buckets for engines to map; with other transports the
    weights are on the host. When trainer and engines take turns on a GPU, they move to the host until engines load. A
    trainer's sleep frees nothing on a CPU.
    """
    on_gpu, transport = bool(place.gpus), resolve_transport(config)
    step = trainer_parts(config, size, on_gpu=on_gpu)
    copy = size.parameters * DTYPE_BYTES[config.model.dtype]
    bucket = min(config.weight_sync.bucket, copy)
    sharded = sends_shards(config)
    # Adapters are small.
    gathers = place.process.endswith("-0") and adapter_way(config) != "load"
    mine = copy // config.trainer.ranks if sharded else copy if gathers else 0
    here = mine > 0 and (not on_gpu or transport in ("ipc", "nccl"))
    published: dict[Part, int] = {"published": mine} if here else {}
    if on_gpu and transport == "ipc":
        step["bucket"] = 2 * bucket
    in_turns = place.turns and on_gpu
    if not in_turns:
        step |= published
    # Megatron keeps the sums of its gradients until it sleeps.
    between = _only(step, _BETWEEN_STEPS | ({"gradients"} if config.trainer.backend == "megatron" else set()))
    gathering: dict[Part, int] = {"bucket": bucket}
    gathering |= between
    # AdamW allocates its moments in the first step.
    starting = dict(gathering)
    del starting["optimizer"]
    if not in_turns:
        if on_gpu:
            between, gathering = step, max(step, gathering, key=lambda parts: sum(parts.values()))
        return {"start": starting, "rollout": between, "train": step, "gather": gathering, "load": between}
    away = _only(step, _KEPT_ASLEEP) | _left_asleep(config, size, step)
    loading = away | (published if sharded else {})
    return {"start": starting, "rollout": away, "train": step, "gather": gathering | published, "load": loading}


def _left_asleep(config: RunConfig, size: ModelSize, step: dict[Part, int]) -> dict[Part, int]:
    """Return the weights that Megatron's sleep leaves on the device: those of its layers, of reference and teacher."""
    trainer = config.trainer
    if trainer.backend != "megatron":
        return {}
    weights = (size.parameters + size.critic) * DTYPE_BYTES[config.model.dtype]
    return {
        "weights": weights // (trainer.tensor_parallel * trainer.pipeline_parallel),
        "reference": step["reference"],
        "teacher": step["teacher"],
    }


def _engine(config: RunConfig, size: ModelSize, place: Place) -> _Stages:
    """Estimate an engine's rank in each stage. An engine that slept loads weights before its cache wakes.

    An embedded engine loads all weights before it quantises any, and then its cache grows with its requests.
    """
    on_gpu, traits, sync = bool(place.gpus), ENGINES[place.kind], config.weight_sync
    adds = adapter_way(config) == "add"
    # Weights travel in the model's type, not quantised.
    weights = size.parameters * DTYPE_BYTES[config.model.dtype] // config.rollout.ranks
    embedded = not traits.package
    output = size.head * 4 if embedded and not on_gpu and config.model.dtype != "float32" else 0
    awake: dict[Part, int] = {
        "runtime": CONTEXT_BYTES * (1 + len(place.opens)) if on_gpu else TORCH_BYTES,
        "weights": held_bytes(config, size) // config.rollout.ranks + output,
        "KV cache": cache_bytes(config, size, embedded=embedded, on_gpu=on_gpu),
    }
    if on_gpu:
        awake["activations"] = decoding_bytes(config, size)
        if embedded and "--decode=static" in config.rollout.engine_args:
            limits = config.rollout.max_batch_size, config.rollout.max_model_len
            awake["activations"] += most_static_steps(*limits) * GRAPH_BYTES
    elif sync.staged or sync.delta or adds:
        # On a CPU the host copies are in the same memory.
        awake["published"] = weights if sync.staged and not (sync.delta or adds) else weights * config.rollout.ranks
    start: dict[Part, int] = {part: n for part, n in awake.items() if part != "KV cache" or not embedded}
    if embedded:
        start["weights"] = weights + output
    bucket: dict[Part, int] = {"bucket": min(sync.bucket, weights)}
    if not (place.turns and (on_gpu or traits.cpu_sleeps)):
        return dict.fromkeys(STAGES, awake) | {"start": start, "load": awake | bucket}
    asleep = _only(awake, _KEPT_ASLEEP)
    loading = asleep | {"weights": awake["weights"]} | bucket
    return {"start": start, "rollout": awake, "train": asleep, "gather": asleep, "load": loading}


def _only(parts: dict[Part, int], kept: frozenset[Part]) -> dict[Part, int]:
    return {part: nbytes for part, nbytes in parts.items() if part in kept}


def _with_room(device: DeviceBudget, config: RunConfig, size: ModelSize) -> DeviceBudget:
    """Shrink the KV caches of engines on a GPU to the memory left, unless rollout.cache_bytes sets their size.

    Raises UserError if such a cache would not hold one sequence.
    """
    engines = [holder for holder in device.holders if holder.role == "engine"]
    if device.limit is None or device.device == CPU or config.rollout.cache_bytes is not None or not engines:
        return device
    caches = [holder.stages["rollout"]["KV cache"] for holder in engines]
    limit = device.limit

    def for_each(stage: Stage) -> float:
        held = [holder.stages[stage]["KV cache"] for holder in engines if "KV cache" in holder.stages[stage]]
        return (sum(held) - max(0, device.total(stage) - limit)) // len(held) if held else math.inf

    left = max(0, int(min(map(for_each, STAGES))))

    def shrunk(holder: Holder) -> Holder:
        stages = {
            stage: {part: min(n, left) if part == "KV cache" else n for part, n in parts.items()}
            for stage, parts in holder.stages.items()
        }
        return msgspec.structs.replace(holder, stages=stages)

    found = msgspec.structs.replace(device, holders=tuple(map(shrunk, device.holders)))
    least = config.rollout.max_model_len * size.kv_per_token * DTYPE_BYTES[config.model.dtype] // config.rollout.ranks
    if left < min(least, *caches):
        raise UserError(
            f"memory of {device.device}: of {gib(device.limit)} (launcher.device_memory) {gib(left)} are left for "
            f"the KV cache of {engines[0].process}, and one sequence of rollout.max_model_len="
            f"{config.rollout.max_model_len} tokens needs {gib(least)}; lower that, or the rest: "
            f"{_needs(found, 'rollout')}"
        )
    return found


def _checked(device: DeviceBudget, config: RunConfig) -> DeviceBudget:
    """Return the budget unchanged. Raises UserError if it exceeds the device."""
    for stage in STAGES:
        if device.limit is not None and device.total(stage) > device.limit:
            raise UserError(
                f"memory of {device.device}: stage '{stage}' of a step needs {gib(device.total(stage))}, and "
                f"launcher.device_memory={config.launcher.device_memory:g} of its {gib(device.capacity or 0)} is "
                f"{gib(device.limit)}. Of that {_needs(device, stage)}"
            )
    return device


def _needs(device: DeviceBudget, stage: Stage) -> str:
    """Name the largest holder of each role, its need and its remedy, in descending order."""
    ascending = sorted(device.holders, key=lambda holder: holder.total(stage))
    of_roles = {holder.role: holder for holder in ascending}.values()
    largest = [holder for holder in reversed(ascending) if holder in of_roles]
    return ". ".join(f"{one.process} needs {gib(one.total(stage))}; {one.remedy(stage)}" for one in largest)


def gib(nbytes: int) -> str:
    """Format a number of bytes in GiB."""
    return f"{nbytes / 2**30:.2f} GiB"
