"""Tokenizers of families of models that cannot be downloaded: bytes, the family's special tokens, and its template."""

import re

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
