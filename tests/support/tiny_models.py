"""Make tiny models and the tokenizers of families that cannot be downloaded."""

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM


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
