"""Functions that the model may call: their JSON schemas in, results or errors as text out.

The episode runner looks tools up by the names in `agent.tools` or in a task. To add a built-in one, write a typed
function with a docstring, which the model sees, and add a line to `tool_registry.py`; users give `path.py:function`.
"""
