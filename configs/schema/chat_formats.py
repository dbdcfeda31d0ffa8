"""The names of the chat formats, which `agent_loop/chat_formats/format_registry.py` makes."""

from typing import Literal, get_args

# Those of the package renderers, in the order in which `auto` tries them: of formats that print the same, the first.
LibraryName = Literal[
    "qwen3",
    "qwen3.5",
    "qwen3.6",
    "qwen3.8",
    "llama-3",
    "glm-4.5",
    "glm-5",
    "glm-5.1",
    "glm-5.3",
    "deepseek-v3",
    "deepseek-r1",
    "kimi-k2",
    "kimi-k2.5",
    "minimax-m2",
    "gemma4",
    "nemotron-3",
    "nemotron-3-ultra",
    "nemotron-3.5",
]
LIBRARY_NAMES: tuple[LibraryName, ...] = get_args(LibraryName)

PastReasoning = Literal["keep", "strip", "split"]
ChatFormatName = Literal["auto", "plain", "hermes", "gpt-oss", "mistral"] | LibraryName
