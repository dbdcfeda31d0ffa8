"""Make tiny vision-language models of every family with random weights, and drawings for them."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3ImageProcessorPil,
    Idefics3ImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    SmolVLMImageProcessorPil,
)

from tests.support.tiny_models import byte_tokenizer

_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
# What templates print where an image stands.
IMAGE = {
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "gemma3": "<start_of_image>",
}
_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_MARKS = [
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_TILES),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<start_of_turn>", "<end_of_turn>"),
]
_TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
)
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Large, so that attention is far from uniform.
    "initializer_range": 0.1,
}
_QWEN_TOWER: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def vision_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte and for each mark that a family uses."""
    tokenizer = byte_tokenizer(_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": _MARKS})
    # Gemma's newlines join those of an image's tokens.
    tokenizer.add_tokens(["\n" * length for length in range(12, 1, -1)])
    tokenizer.pad_token = "<|endoftext|>"
    return tokenizer


def vision_config(family: str, tokenizer: PreTrainedTokenizerFast, **text: Any) -> Any:
    """The configuration of a tiny model; ``text`` overrides its language model's."""

    def token(name: str) -> int:
        (number,) = tokenizer.encode(name, add_special_tokens=False)
        return number

    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": token("<|im_end|>")}
    text = _TEXT | ids | {"bos_token_id": None} | text
    match family:
        case "qwen2_5_vl" | "qwen3_vl":
            tower = _QWEN_TOWER | {"out_hidden_size": text["hidden_size"], "patch_size": 8}
            part = text["head_dim"] // 16
            rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2 * part, 3 * part, 3 * part]}
            if family == "qwen2_5_vl":
                text.pop("head_dim")
                tower |= {"window_size": 32, "fullatt_block_indexes": [1]}
            else:
                rope["mrope_interleaved"] = True
                tower |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
            return AutoConfig.for_model(
                family,
                text_config=text | {"rope_parameters": rope},
                vision_config=tower,
                image_token_id=token("<|image_pad|>"),
                video_token_id=token("<|video_pad|>"),
                vision_start_token_id=token("<|vision_start|>"),
                vision_end_token_id=token("<|vision_end|>"),
                tie_word_embeddings=family == "qwen2_5_vl",
            )
        case "idefics3" | "smolvlm":
            return AutoConfig.for_model(
                family,
                text_config=text | {"model_type": "llama"},
                vision_config=_TOWER,
                image_token_id=token("<image>"),
                scale_factor=2,
                pad_token_id=tokenizer.pad_token_id,
            )
        case "gemma3":
            return AutoConfig.for_model(
                family,
                text_config=text | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
                vision_config=_TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
                mm_tokens_per_image=4,
                boi_token_index=token("<start_of_image>"),
                eoi_token_index=token("<end_of_image>"),
                image_token_index=token("<image_soft_token>"),
            )
    raise AssertionError(family)


def image_processor(family: str) -> Any:
    """The family's image processor, for the tower of ``vision_config``."""
    match family:
        case "qwen2_5_vl" | "qwen3_vl":
            size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
            return Qwen2VLImageProcessorPil(patch_size=8, temporal_patch_size=2, merge_size=2, size=size)
        case "idefics3" | "smolvlm":
            kind = Idefics3ImageProcessorPil if family == "idefics3" else SmolVLMImageProcessorPil
            return kind(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
        case "gemma3":
            return Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    raise AssertionError(family)


def save_vision_model(family: str, folder: Path, **text: Any) -> None:
    """Save a tiny random model of the family with its tokenizer and image processor."""
    torch.manual_seed(0)
    tokenizer = vision_tokenizer()
    model = AutoModelForImageTextToText.from_config(vision_config(family, tokenizer, **text))
    for parameter in model.parameters():
        # Gemma's projector begins at zero.
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    image_processor(family).save_pretrained(folder)
    if family in ("idefics3", "smolvlm"):
        # Processors of whole prompts read this; the tower has 4 x 4 patches a tile, of which 2 x 2 are a token.
        (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": 4}))


def drawing(seed: int, width: int = 40, height: int = 24, form: str = "PNG", mode: str = "RGB") -> bytes:
    """An image file of random colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).convert(mode).save(file, form)
    return file.getvalue()
