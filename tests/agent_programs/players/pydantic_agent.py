"""Plays an episode with pydantic-ai and an output type: ``python pydantic_agent.py PROMPT``."""

import sys

import pydantic
import pydantic_ai


class Taken(pydantic.BaseModel):
    """The digit taken."""

    digit: int


agent = pydantic_ai.Agent("openai-chat:policy", output_type=Taken)


@agent.tool_plain
def show(digit: int) -> str:
    """Show a digit."""
    return str(digit)


print(agent.run_sync(sys.argv[1]).output.digit)
