"""Environments that play a run's episodes themselves, through its gateway, in a Python of their own.

`agent.gateway` with `agent.environment=verifiers:NAME` and `agent.environment_hosts.python` starts them. `__main__.py`
keeps one: it runs in the trainer's Python, reads the run's config and ends all that the player started. The player,
`verifiers.py`, runs in the other Python and imports no dependency of rl-async.
"""
