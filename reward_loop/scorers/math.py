"""The scorer `math`: mathematical equality as math-verify decides it."""

from rl_async.reward_loop.api import Conversation


def score(conversation: Conversation) -> float:
    """Return 1 if the answer equals the ground truth mathematically (numbers, LaTeX, sets, intervals); else 0.

    math-verify's own timeouts are off: they use the alarm signal, and the service has a deadline.
    """
    from math_verify import parse, verify

    truth = conversation.ground_truth
    # Without an anchor LaTeX is not recognised as such.
    gold = parse(truth if "$" in truth or "\\boxed" in truth else f"${truth}$", parsing_timeout=None)
    answer = parse(conversation.solution_str, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))
