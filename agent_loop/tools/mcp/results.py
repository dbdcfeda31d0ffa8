"""A call's result as text for the model: pure functions. What a server returns is text from outside."""

from collections.abc import Mapping
from typing import Any

import msgspec

from rl_async.agent_loop.tools.tool import ToolResult, failed

MOST_CHARACTERS = 1 << 18  # of a result, before agent.tool_response_tokens is applied
REASON_CHARACTERS = 500


def as_result(answer: Mapping[str, Any]) -> ToolResult:
    """Convert the result of `tools/call`, as the protocol writes it in JSON, to what tools of ours return."""
    content = answer.get("content") or ()
    text = "\n".join(map(_text, content))
    structured = answer.get("structuredContent")
    if structured is not None and not any(block.get("type") == "text" for block in content):
        text = "\n".join(filter(None, [msgspec.json.encode(structured).decode(), text]))
    whole = len(text) if len(text) > MOST_CHARACTERS else 0
    text = text[:MOST_CHARACTERS]
    return failed(text or "the tool failed", whole) if answer.get("isError") else ToolResult(text, whole=whole)


def _text(block: Mapping[str, Any]) -> str:
    """Return a block's text, or words in the place of what is no text."""
    match block.get("type"):
        case "text":
            return str(block["text"])
        case "image" | "audio" as kind:
            return f"[{kind}: {block.get('mimeType', '')}, {_bytes(block.get('data'))}, which cannot be shown as text]"
        case "resource_link":
            about = [block.get(key) for key in ("name", "description", "mimeType")]
            return f"[resource {block.get('uri', '')}: {', '.join(str(part) for part in about if part)}]"
        case "resource":
            return _resource(block.get("resource") or {})
        case kind:
            return f"[{kind}, which cannot be shown as text]"


def _resource(resource: Mapping[str, Any]) -> str:
    if "text" in resource:
        return str(resource["text"])
    kind, size = resource.get("mimeType") or "binary", _bytes(resource.get("blob"))
    return f"[resource {resource.get('uri', '')}: {kind}, {size}, which cannot be shown as text]"


def _bytes(data: object) -> str:
    """Return the size of what is given in base64."""
    return f"{len(data) * 3 // 4} bytes" if isinstance(data, str) else "no data"
