"""A reward that costs next to nothing and differs within a group, for ours and for TRL's."""


def digits(text: str) -> float:
    """The share of digits among the characters of ``text``."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


async def scored(solution_str: str) -> float:
    """The same, as rl-async asks for it; a coroutine function runs where the rollouts are played."""
    return digits(solution_str)
