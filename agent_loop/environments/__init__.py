"""Stateful worlds that live for one episode and hand out tools which act on them.

The episode runner enters an environment before the first turn with the episode's task, offers its tools to the model,
and leaves it after the last. To add a built-in one, write its class in a file here and add a line to `registry.py`;
users give their own as `path.py:Class`.
"""
