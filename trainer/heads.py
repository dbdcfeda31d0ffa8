"""A language model and the heads on it, as one module: ``fully_shard`` then gathers every weight where it is used."""

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModel, AutoModelForCausalLM

from rl_async.errors import UserError

Head = Literal["policy", "value", "both"]

MODEL_FOLDER = "model"
VALUE_HEAD_FILE = "value_head.safetensors"


class ValueHead(torch.nn.Linear):
    """Hidden states [B, T, H] to one number each [B, T]; 0 at first.

    So every rank starts alike, and the first gradients leave the backbone alone. The result is no view of another
    tensor: FSDP's hooks would be lost if somebody wrote to one.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight[0] + self.bias


class Headed(torch.nn.Module):
    """``lm`` is a Hugging Face causal LM, or with head "value" the decoder without its logits."""

    def __init__(self, lm: Any, head: Head) -> None:
        super().__init__()
        self.lm = lm
        self.value_head = None if head == "policy" else ValueHead(lm.config.hidden_size)
        self.has_logits = head != "value"

    def forward(self, tokens: Tensor, want_values: bool) -> tuple[Tensor | None, Tensor | None]:
        """Logits [B, T, V] and values [B, T] of tokens [B, T]; what the head lacks or nobody wants is None."""
        if not self.has_logits:
            return None, self._values(self.lm(input_ids=tokens, use_cache=False).last_hidden_state)
        if not want_values:
            return self.lm(input_ids=tokens, use_cache=False).logits, None
        out = self.lm(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return out.logits, self._values(out.hidden_states[-1])

    def _values(self, hidden: Tensor) -> Tensor:
        assert self.value_head is not None, "values are wanted of a model without a value head"
        return self.value_head(hidden)


def load_headed(path: str, head: Head) -> Headed:
    """Read float32 weights from a Hugging Face folder, or from the ``critic`` folder of a checkpoint with its head.

    Raises UserError if there is no model of the kind.
    """
    saved = Path(path) / MODEL_FOLDER
    folder = str(saved) if saved.is_dir() else path
    kind: Any = AutoModel if head == "value" else AutoModelForCausalLM
    key, what = ("critic.path", "decoder") if head == "value" else ("model.path", "causal LM")
    try:
        lm = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: cannot load a {what} from {path}: {error}") from error
    model = Headed(lm, head)
    weights = Path(path) / VALUE_HEAD_FILE
    if model.value_head is not None and weights.is_file():
        model.value_head.load_state_dict(load_file(weights))
    return model


def shard(model: Headed, mesh: DeviceMesh, dtype: torch.dtype) -> Any:
    """The model under ``fully_shard``: still the module it was, and an FSDPModule too. Computes in ``dtype``, but
    values in float32: they are regressed, and bfloat16 has three digits."""
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.lm.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    if model.value_head is not None:
        fully_shard(model.value_head, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    return fully_shard(model, mesh=mesh, mp_policy=policy)
