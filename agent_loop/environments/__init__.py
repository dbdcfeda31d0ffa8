"""Worlds and simulated users that live for one episode: they answer turns, offer tools, judge and end the episode.

The episode runner opens a `session.Session` on an environment made from the episode's task, before the first turn, and
closes it after the last; `interface.Environment` has the methods. An environment of several roles, `interface.Game`,
has a `session.GameSession` instead. It lives in this process or in one of the worker's hosts (`host_pool.py`). To
add a built-in one, write its class in a file here and add a line to `environment_registry.py`; users give their own as
`path.py:Class`.
"""
