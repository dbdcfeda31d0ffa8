"""Plays an episode with the OpenAI Agents SDK: ``python agents_sdk.py PROMPT``."""

import sys

from agents import Agent, Runner, function_tool


@function_tool
def show(digit: int) -> str:
    """Show a digit."""
    return str(digit)


print(Runner.run_sync(Agent(name="player", model="policy", tools=[show]), sys.argv[1]).final_output)
