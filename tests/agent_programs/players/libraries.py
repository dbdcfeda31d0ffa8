"""Plays an episode with an agent library: ``python libraries.py LIBRARY PROMPT``.

Each library is imported where it is used, since each has an environment of its own.
"""

import json
import os
import sys
from typing import Any

TURNS = 6
SCHEMA = {"type": "object", "properties": {"digit": {"type": "integer"}}, "required": ["digit"]}
TOOL: Any = {"name": "show", "description": "Show a digit.", "parameters": SCHEMA}


def show(digit: int) -> str:
    """Show a digit.

    Args:
        digit: The digit to show.
    """
    return str(digit)


def shown(arguments: str) -> str:
    """Call ``show`` with the arguments that the model sampled."""
    try:
        return show(json.loads(arguments)["digit"])
    except (ValueError, KeyError, TypeError):
        return "error: no digit"


def openai_chat(prompt: str, streaming: bool = False) -> str:
    """OpenAI's client over chat completions."""
    import openai

    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": prompt}]
    request: Any = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
    for _ in range(TURNS):
        if streaming:
            with client.chat.completions.stream(**request) as stream:
                reply = stream.get_final_completion().choices[0].message
        else:
            reply = client.chat.completions.create(**request).choices[0].message
        if not reply.tool_calls:
            return reply.content or ""
        messages.append(reply.to_dict())
        for call in reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": shown(call.function.arguments)})
    return ""


def openai_responses(prompt: str) -> str:
    """OpenAI's client over responses."""
    import openai

    client = openai.OpenAI()
    items: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(TURNS):
        reply = client.responses.create(model="policy", input=items, tools=[{"type": "function", **TOOL}])
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply.output_text
        items += reply.output
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": shown(call.arguments)})
    return ""


def anthropic_thinking(prompt: str) -> str:
    """Call Anthropic's client with thinking on."""
    import anthropic

    client = anthropic.Anthropic()
    messages: list[Any] = [{"role": "user", "content": prompt}]
    said = ""
    for _ in range(TURNS):
        reply = client.messages.create(
            model="claude-sonnet-4-5",
            max_tokens=2048,
            thinking={"type": "enabled", "budget_tokens": 1024},
            tools=[{"name": "show", "description": "Show a digit.", "input_schema": SCHEMA}],
            messages=messages,
        )
        said = "".join(block.text for block in reply.content if block.type == "text")
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            break
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input.get("digit"))} for call in calls
        ]
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    return said


def litellm_cold(prompt: str) -> str:
    """Call LiteLLM at temperature 0."""
    import litellm

    messages: list[Any] = [{"role": "user", "content": prompt}]
    tools = [{"type": "function", "function": TOOL}]
    said = ""
    for _ in range(TURNS):
        reply = litellm.completion(model="openai/policy", messages=messages, tools=tools, temperature=0)
        message = reply.choices[0].message
        said = message.content or ""
        if not message.tool_calls:
            break
        messages.append(message.to_dict())
        for call in message.tool_calls:
            digit = json.loads(call.function.arguments).get("digit")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(digit)})
    return said


def agents_sdk(prompt: str) -> str:
    """The OpenAI Agents SDK."""
    from agents import Agent, Runner, function_tool

    return str(Runner.run_sync(Agent(name="player", model="policy", tools=[function_tool(show)]), prompt).final_output)


def langgraph(prompt: str) -> str:
    """LangGraph's agent over langchain-openai."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model="policy"), tools=[show])
    return str(agent.invoke({"messages": [{"role": "user", "content": prompt}]})["messages"][-1].content)


def pydantic_agent(prompt: str) -> str:
    """Run an agent of pydantic-ai that has an output type."""
    import pydantic
    import pydantic_ai

    taken: Any = pydantic.create_model("Taken", digit=(int, ...))
    agent: Any = pydantic_ai.Agent("openai-chat:policy", output_type=taken, tools=[show])
    return str(agent.run_sync(prompt).output.digit)


def smolagents(prompt: str) -> str:
    """Run the ToolCallingAgent of smolagents."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(
        model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    return str(ToolCallingAgent(tools=[tool(show)], model=model).run(prompt))


LIBRARIES = {
    "openai-chat": openai_chat,
    "openai-streaming": lambda prompt: openai_chat(prompt, streaming=True),
    "openai-responses": openai_responses,
    "anthropic": anthropic_thinking,
    "litellm": litellm_cold,
    "openai-agents": agents_sdk,
    "langgraph": langgraph,
    "pydantic-ai": pydantic_agent,
    "smolagents": smolagents,
}

if __name__ == "__main__":
    library, prompt = sys.argv[1:]
    print(LIBRARIES[library](prompt))
