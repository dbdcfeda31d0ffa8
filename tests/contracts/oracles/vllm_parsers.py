"""Reads texts with vLLM's parsers of reasoning and tool calls, for the tests, in the environment that has vLLM.

    .venv-vllm/bin/python vllm_parsers.py QUESTIONS ANSWERS

QUESTIONS is a JSON list of {tokenizer, tool_parser, reasoning_parser, tools, texts}; ANSWERS becomes a list of lists of
{reasoning, content, calls}, or {error}. Nothing of rl-async is imported here.
"""

import json
import logging
import sys
from typing import Any

from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager


def read(question: dict[str, Any]) -> list[dict[str, Any]]:
    """Parse as vLLM's server does: the reasoning first, then calls in the rest."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(question["tokenizer"])
    request = ChatCompletionRequest(
        model="policy", messages=[{"role": "user", "content": "x"}], tools=question["tools"], tool_choice="auto"
    )
    return [_read(question, tokenizer, request, text) for text in question["texts"]]


def _read(question: dict[str, Any], tokenizer: Any, request: Any, text: str) -> dict[str, Any]:
    reasoning = ""
    try:
        if question["reasoning_parser"]:
            parser = ReasoningParserManager.get_reasoning_parser(question["reasoning_parser"])(tokenizer)
            reasoning, rest = parser.extract_reasoning(text, request)
            text = rest or ""
        found = ToolParserManager.get_tool_parser(question["tool_parser"])(tokenizer, request.tools).extract_tool_calls(
            text, request
        )
    except Exception as error:  # which its server would answer with
        return {"error": repr(error)}
    calls = [[call.function.name, call.function.arguments] for call in found.tool_calls]
    return {"reasoning": reasoning or "", "content": found.content or "", "calls": calls}


def main() -> None:
    logging.disable(logging.CRITICAL)
    with open(sys.argv[1]) as file:
        questions = json.load(file)
    answers = [read(question) for question in questions]
    with open(sys.argv[2], "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main()
