"""Tools of MCP servers (Model Context Protocol): `agent.mcp` in, tools as the episode runner knows them out.

A worker enters `toolbox.McpToolbox`, which asks every server for its tools (`descriptions.py`) before the first lease;
the episode runner takes each episode's tools from it. Calls go through `sessions.py`, which opens a session when it is
needed and again after a server was lost, and holds it in a task of its own (`connection.py`).
`rl_async/process/guard.py` ends a server's processes with the worker. The SDK is imported by `connection.py` alone, and
only if the config has servers.
"""
