"""An MCP server with one tool, as a user would write it; docs/how-to/mcp.md trains a model to call it.

pip install 'rl-async[mcp]'
rl-async launch --mode disaggregated --config calculator agent.tools='[]' \\
    agent.mcp='[{command: python examples/mcp_calculator.py, scope: worker}]'
"""

from mcp.server.mcpserver import MCPServer

from rl_async.agent_loop.tools.tool import evaluate

server = MCPServer("calculator")


@server.tool()
async def calculator(expression: str) -> str:
    """Evaluate whole-number arithmetic with + - * and parentheses."""
    return str(evaluate(expression))


if __name__ == "__main__":
    server.run()
