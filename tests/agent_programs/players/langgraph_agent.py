"""Plays an episode with LangGraph's agent over langchain-openai: ``python langgraph_agent.py PROMPT``."""

import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def show(digit: int) -> str:
    """Show a digit."""
    return str(digit)


agent = create_agent(ChatOpenAI(model="policy"), tools=[show])
print(agent.invoke({"messages": [{"role": "user", "content": sys.argv[1]}]})["messages"][-1].content)
