"""The engine's spans of a request: its wait, its prefill and its decoding, below the span that the request names."""

import time

from rl_async import tracing
from rl_async.rollout_server.embedded.sequence import Sequence
from rl_async.tracing import Value


def finished(sequence: Sequence) -> None:
    """Add the spans of a sequence that has just finished, if its request names a span.

    What a pause, an update of the weights or a preemption takes is in the span in which it happened.
    """
    above = sequence.traceparent
    if not above:
        return
    ended = sequence.ended_at or time.time_ns()
    admitted, sampled = sequence.admitted_at or ended, sequence.sampled_at or ended
    tracing.add_below(above, "wait for engine", sequence.arrived_at, admitted, {})
    if sequence.admitted_at:
        tokens: dict[str, Value] = {
            "gen_ai.usage.input_tokens": sequence.prompt_length,
            "rl_async.cached_tokens": sequence.cached_tokens,
        }
        tracing.add_below(above, "prefill", admitted, sampled, tokens)
    if sequence.sampled_at:
        reason = sequence.finish_reason or ""
        about: dict[str, Value] = {
            "gen_ai.usage.output_tokens": len(sequence.logprobs),
            "gen_ai.response.finish_reasons": [reason],
            "rl_async.versions": [version for version, _ in sequence.runs],
        }
        tracing.add_below(above, "decode", sampled, ended, about)
