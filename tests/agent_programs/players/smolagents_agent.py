"""Plays an episode with smolagents' ToolCallingAgent: ``python smolagents_agent.py PROMPT``."""

import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def show(digit: int) -> str:
    """Show a digit.

    Args:
        digit: The digit to show.
    """
    return str(digit)


model = OpenAIServerModel(
    model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
print(ToolCallingAgent(tools=[show], model=model).run(sys.argv[1]))
