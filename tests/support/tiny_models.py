"""Make tiny models and the tokenizers of families that cannot be downloaded."""

import functools
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3ImageProcessorPil,
    Idefics3ImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolVLMImageProcessorPil,
)


def sparse_model(vocab: int = 64, layers: int = 2, **more: Any) -> Qwen3MoeForCausalLM:
    """A random Qwen3-MoE of 8 experts, two for each token, away from the even distribution of a fresh one."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "tie_word_embeddings": True,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(sizes | more))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() >= 2 else 1.0)
    return model


def chosen(model: Any, tokens: list[int]) -> Tensor:
    """The experts [tokens, layers, k] of a plain forward pass over one sequence, each token's in ascending order."""
    found: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _module, _arguments, output: found.append(output[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values


def pickled(model: Path, copy: Path) -> Path:
    """Copy a model folder, with its weights as ``pytorch_model.bin`` alone; return the copy."""
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file(model / "model.safetensors"), copy / "pytorch_model.bin")
    return copy


_SPECIAL = (
    r"<[|｜][^\s<>|｜]{1,40}[|｜]>|\[/?[A-Za-z_]{3,20}\]"
    r"|<[a-z_]+\|>|<\|[a-z_]+>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|\]~!b\[|\]~b\]|\[e~\["
)
_PLAIN = r"</?(?:think|tool_call|tool_response|arg_key|arg_value|tool_calls|minimax:tool_call)>"
# What models know besides what their templates print.
_MORE = [
    *(
        "<|endoftext|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|user|>",
        "<|observation|>",
        "<eos>",
    ),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>", "<|video|>"),
]


def byte_tokenizer(template: str, *, bos: str | None = None, eos: str = "<|endoftext|>") -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each byte and for each special token in ``template``."""
    special = {*re.findall(_SPECIAL, template), *_MORE, eos, *([bos] if bos else [])}
    plain = {*re.findall(_PLAIN, template)}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(text, special=re.fullmatch(_SPECIAL, text) is not None, normalized=False)
            for text in sorted(special | plain)
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
    )


_ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
# TinyLlama 1.1B Chat v1.0 and Zephyr 7B beta have the same.
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    + _ALTERNATE
    + "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    + _ALTERNATE
    + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
TEMPLATES = {"TinyLlama and Zephyr": ZEPHYR, "Llama 2": LLAMA_2, "Mistral 7B v0.2": MISTRAL}
KINDS = ("a space before each part", "Metaspace always", "Metaspace first", "Metaspace never", "Unigram")
_WORDS = [
    *("what", "is", "one", "plus", "two", "three", "four", "sum", "the", "answer"),
    *("equals", "thanks", "hello", "you", "are", "welcome", "brief", "be"),
]
_SENTENCEPIECE_SPECIAL = ["<unk>", "<s>", "</s>"]


@functools.cache
def _pieces(kind: Literal["Unigram", "BPE"]) -> str:
    """The JSON of a trained model of tokens."""
    texts = [f"\u2581{first}\u2581{second}" for first in _WORDS for second in _WORDS]
    letters = sorted({*"".join(texts), *"<|>[]/ISTNYabcdefghijklmnopqrstuvwxyz?.,!0123456789"} - {" "})
    if kind == "Unigram":
        unigram = Tokenizer(models.Unigram())
        unigram.train_from_iterator(
            texts,
            trainers.UnigramTrainer(
                vocab_size=200, special_tokens=_SENTENCEPIECE_SPECIAL, unk_token="<unk>", initial_alphabet=letters
            ),
        )
        return str(unigram.to_str())
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=260, special_tokens=_SENTENCEPIECE_SPECIAL, initial_alphabet=letters),
    )
    return str(bpe.to_str())


def sentencepiece_tokenizer(kind: str, template: str) -> PreTrainedTokenizerFast:
    """Make a small tokenizer with byte fallback, as conversions of SentencePiece models are written."""
    made: dict[str, Any] = json.loads(_pieces("Unigram" if kind == "Unigram" else "BPE"))
    if kind == "Unigram":
        made["model"]["vocab"] += [[f"<0x{byte:02X}>", 0.0] for byte in range(256)]
    else:
        vocab = made["model"]["vocab"]
        vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
        made["model"]["fuse_unk"] = True
    made["model"]["byte_fallback"] = True
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    if kind == "a space before each part":
        prepend = {"type": "Prepend", "prepend": "\u2581"}
        made["normalizer"] = {"type": "Sequence", "normalizers": [prepend, replace]}
    else:
        scheme = kind.removeprefix("Metaspace ") if kind.startswith("Metaspace") else "always"
        made["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": scheme,
            "split": kind == "Unigram",
        }
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    made["decoder"] = {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)),
        chat_template=template,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


# Make tiny vision-language models of every family with random weights, and drawings for them.


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


# Writes a GGUF file of a tiny Llama with a byte-level tokenizer and a chat template, as llama.cpp's tools would.


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN, INNER, HEADS, LAYERS = 32, 64, 2, 2


def write_gguf(file: Path) -> None:
    """Write the file; the package gguf must be installed."""
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ab"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    numbers = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        own = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (HIDDEN // HEADS, HIDDEN),
            "attn_v": (HIDDEN // HEADS, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
    for name, shape in shapes.items():
        writer.add_tensor(name, numbers.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
