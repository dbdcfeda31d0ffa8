"""JSON schemas that the embedded engine can keep answers to, by llguidance (the extra ``json``). Without torch, so that
a gateway can refuse a schema before it asks an engine."""

from importlib.util import find_spec

import msgspec

INSTALL = "pip install 'rl-async[json]'"


def problem(schema: str) -> str:
    """Say why the embedded engine cannot keep an answer to a schema, JSON text; empty if it can.

    Blocks while the schema is compiled: milliseconds, and at most about a second for one at the library's limits.
    """
    if find_spec("llguidance") is None:
        return f"the embedded engine needs llguidance for JSON schemas: {INSTALL}"
    from llguidance import LLMatcher

    try:
        compiled = LLMatcher.grammar_from_json_schema(_one_line(schema))
    except (ValueError, msgspec.DecodeError) as error:
        return str(error)
    return LLMatcher.validate_grammar(compiled)


def grammar(schema: str) -> str:
    """Return a schema without ``problem`` as a grammar of llguidance.

    Without ``no_forcing`` text that leaves no choice could be written as one sequence of tokens only, unlike in vLLM.
    """
    return f'%llguidance {{"no_forcing": true}}\nstart: %json {_one_line(schema)}'


def _one_line(schema: str) -> str:
    return msgspec.json.encode(msgspec.json.decode(schema)).decode()
