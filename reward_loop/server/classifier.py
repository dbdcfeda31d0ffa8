"""A sequence classifier with one label: token ids in, one number for each conversation out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rl_async.errors import UserError
from rl_async.model_files import read_object
from rl_async.torch_shared import pick_device

SUFFIX = "ForSequenceClassification"


def load_classifier(path: str, dtype: str, device: str) -> torch.nn.Module:
    """Load the classifier in ``path`` for inference; the ``device`` "auto" prefers a GPU.

    Raises UserError if it is not a sequence classifier with one label: a causal LM would load, with a random head.
    """
    config = _read_config(Path(path))
    architectures = config.get("architectures") or []
    if not any(name.endswith(SUFFIX) for name in architectures):
        raise UserError(
            f"reward model: {path} holds {', '.join(architectures) or 'no architecture'}, not a sequence classifier; "
            "`rl-async reward-model` trains one"
        )
    try:
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        # Transformers adds paragraphs of advice.
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"reward model: cannot load {path}: {reason}") from error
    if model.config.num_labels != 1:
        raise UserError(f"reward model: {path} has {model.config.num_labels} labels; a reward needs one (num_labels=1)")
    return model.to(pick_device(device)).eval()


def _read_config(path: Path) -> dict[str, Any]:
    # Transformers would look for a missing folder on the Hub.
    if not path.is_dir():
        raise UserError(f"reward model: there is no folder {path}")
    try:
        return read_object(path / "config.json", "reward model")
    except OSError as error:
        raise UserError(f"reward model: {path}/config.json cannot be read: {error}") from error


def longest(model: Any) -> int | None:
    """Return the model's number of positions, which bounds a sequence's tokens, or None if unknown."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


def values(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the classifier's output for each of N token sequences, float32 [N], with gradients if they are on.

    A decoder's output is taken at the last token that is not padding, and many tokenizers pad with the token that ends
    a turn. So rows are padded on the right with a token that ends none of them.
    """
    ends = {row[-1] for row in rows}
    text_config = model.config.get_text_config()
    candidates = (text_config.pad_token_id, *range(len(rows) + 1))
    padding = next(token for token in candidates if token is not None and token not in ends)
    text_config.pad_token_id = padding
    width = max(len(row) for row in rows)
    tokens = torch.full((len(rows), width), padding)
    attended = torch.zeros((len(rows), width), dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
        attended[i, : len(row)] = 1
    device = next(model.parameters()).device
    logits = model(input_ids=tokens.to(device), attention_mask=attended.to(device)).logits
    return logits[:, 0].float()


@torch.inference_mode()
def score(model: Any, rows: Sequence[Sequence[int]]) -> list[float]:
    """Return ``values`` as floats, without gradients."""
    return [float(value) for value in values(model, rows)]
