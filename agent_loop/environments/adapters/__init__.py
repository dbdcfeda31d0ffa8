"""Environments of other projects, as `agent.environment=PROJECT:NAME`.

Each file has one class, made from NAME, a task and `agent.environment_options`, and its docstring says what those are.
To add one, add a file here and a line to `registry.py` of the folder above.
"""
