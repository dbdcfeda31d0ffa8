"""A language model and the heads on it, as one module: ``fully_shard`` then gathers every weight where it is used."""

import logging
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import UserError
from rl_async.model_files import experts_of
from rl_async.trainer.backends.interface import OutputName, Outputs, policy_outputs
from rl_async.trainer.batches.packed_tree import PackedTree, pack_tree
from rl_async.trainer.batches.packing import Packed, pack
from rl_async.trainer.batches.tensors import Tensors
from rl_async.trainer.model.families import logit_form, why_not_shared, why_padded
from rl_async.trainer.model.kernels import apply_liger, attention, why_prefixes_apart
from rl_async.trainer.model.logprobs import Head as LogitHead
from rl_async.trainer.model.logprobs import head_logits, token_stats
from rl_async.trainer.model.pretrained import Pretrained, StoredWeights, skeleton
from rl_async.trainer.model.routing import RouterReplay, check_records, is_replayed, why_not_replayed
from rl_async.trainer.model.ulysses import Sharing, gathered

log = logging.getLogger("rl_async.trainer")

Head = Literal["policy", "value", "both"]

MODEL_FOLDER = "model"
VALUE_HEAD_FILE = "value_head.safetensors"
VALUE_HEAD = "value_head."  # prefix of its tensors in a checkpoint's shards


class ValueHead(torch.nn.Linear):
    """Hidden states [B, T, H] to one number each [B, T]; 0 at first.

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
    """``lm`` is a Hugging Face causal LM, or with head "value" the decoder without its logits. Ranks that share rows
    pass the same ones, and each gets the outputs of all of their tokens."""

    def __init__(self, lm: Any, head: Head, sharing: Sharing | None = None, shares_prefixes: bool = False) -> None:
        super().__init__()
        self.lm = lm
        self.value_head = None if head == "policy" else ValueHead(lm.config.hidden_size)
        self.has_logits = head != "value"
        self.packs = why_padded(lm.config) is None
        self.sharing = sharing
        self.shares_prefixes = shares_prefixes
        self.replay: RouterReplay | None = None

    def outputs(self, batch: Tensors, requested: frozenset[OutputName]) -> Outputs:
        """One pass over a micro-batch: packed if the model can be, with shared prefixes if it has any, else padded."""
        if not self.packs:
            return Outputs(**self(batch, requested))
        if self.replay is not None and batch.experts is not None:
            check_records(batch.experts, self.lm.config)
        packed = pack(batch) if batch.tree is None or not self.shares_prefixes else pack_tree(batch, batch.tree)
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
        """The fields of ``Outputs``, [N, ...] of a packed batch, [M, ...] of a packed tree, [B, T-1, ...] of a padded
        one; none is a view.

        Log-probabilities are made in here, where FSDP has gathered lm_head's weight, once for all chunks.
        """
        return (
            self._packed(batch, requested) if isinstance(batch, Packed | PackedTree) else self._padded(batch, requested)
        )

    def _packed(self, packed: Packed | PackedTree, requested: frozenset[OutputName]) -> dict[str, Tensor | None]:
        inputs = packed.backbone_inputs()
        if self.sharing is not None:
            inputs["sharing_ranks"] = self.sharing.group
        outputs: dict[str, Tensor | None] = {}
        if self.replay is None or packed.experts is None:
            states = self.lm.base_model(**inputs).last_hidden_state[0]
        else:
            self.replay.begin()
            states = self.lm.base_model(**inputs, routed_experts=packed.experts).last_hidden_state[0]
            outputs["agreement"] = packed.predicting(self.replay.end()[:, None])[:, 0]
        hidden = packed.predicting(states)
        if self.has_logits:
            head = LogitHead(self.lm.lm_head.weight, self.lm.lm_head.bias, logit_form(self.lm.config))
            outputs |= token_stats(hidden, head, packed.targets, packed.temperature, requested)._asdict()
            if "distribution" in requested:
                outputs["distribution"] = head_logits(hidden, head, packed.temperature).log_softmax(-1)
        if not self.has_logits or "values" in requested:
            outputs["values"] = self._values(hidden)
        return outputs

    def _padded(self, batch: Tensors, requested: frozenset[OutputName]) -> dict[str, Tensor | None]:
        """Padding stands behind every real token, where causal attention never looks."""
        if not self.has_logits:
            hidden = self.lm(input_ids=batch.tokens, use_cache=False).last_hidden_state
            return {"values": self._values(hidden[:, :-1])}
        out = self.lm(input_ids=batch.tokens, use_cache=False, output_hidden_states="values" in requested)
        logits = out.logits[:, :-1].float() / batch.temperature
        outputs = policy_outputs(logits, batch.tokens[:, 1:], requested - {"values"})
        values = self._values(out.hidden_states[-1][:, :-1]) if "values" in requested else None
        return {name: getattr(outputs, name) for name in outputs.__struct_fields__} | {"values": values}

    def _values(self, hidden: Tensor) -> Tensor:
        assert self.value_head is not None, "values are requested of a model without a value head"
        return self.value_head(hidden).float()


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
    those that the model will compute on and in. Raises UserError if there is no model of the kind, or if it cannot
    compute as ``options`` say.
    """
    options = options or TrainerConfig()
    saved = Path(path) / MODEL_FOLDER
    folder = saved if saved.is_dir() else Path(path)
    kind: Any = AutoModel if head == "value" else AutoModelForCausalLM
    key, what = ("critic.path", "decoder") if head == "value" else ("model.path", "causal LM")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if sharing is not None and (reason := why_not_shared(config, sharing.size)):
            raise UserError(f"trainer.sequence_parallel={sharing.size} does not go with {key}={path}: {reason}")
        lm = skeleton(kind, config, attention(config))
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: cannot load a {what} from {path}: {error}") from error
    pretrained = Pretrained(lm, StoredWeights(folder, key))
    if options.kernels == "liger":
        apply_liger(lm, device)
    if reason := why_padded(lm.config):
        log.warning("%s: rows of %s are padded, not packed, which is slower: %s", key, path, reason)
    if apart := why_prefixes_apart(lm.config, device, options):
        log.info("%s: what rows of %s begin with is computed for each of them: %s", key, path, apart)
    model = Headed(lm, head, sharing, shares_prefixes=apart is None)
    weights = Path(path) / VALUE_HEAD_FILE
    if model.value_head is not None and weights.is_file():
        model.value_head.load_state_dict(load_file(weights))
    return model, pretrained


def replay_routers(model: Headed, options: TrainerConfig) -> None:
    """Let a policy replay the experts that engines chose, as ``trainer.router_replay`` says.

    Raises UserError if it is to and its routers cannot.
    """
    config = model.lm.config
    reason = why_not_replayed(config, packs=model.packs, compiled=options.compile)
    if is_replayed(options, experts_of(config), reason):
        model.replay = RouterReplay(model.lm)
