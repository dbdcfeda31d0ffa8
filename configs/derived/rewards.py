"""The bound on rewards (``reward.limit``), checked wherever a reward comes in."""

from collections.abc import Mapping


def unbounded(values: Mapping[str, float], limit: float) -> str | None:
    """Name the first value that is beyond the limit or not a number, with the key; None if all are within it.

    A value of 1e39 is infinite as a float32 and ends the run; 1e12 drowns the rewards that it is compared with.
    """
    for name, value in values.items():
        if not abs(value) <= limit:
            return f"{name} is {value:g}, which is not from {-limit:g} to {limit:g} (reward.limit)"
    return None
