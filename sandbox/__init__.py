"""Runs code that nobody vouches for: programs go in, their output comes out, and nothing else passes either way.

A `Sandbox` (`api.py`) opens workspaces; the tools `python` and `bash` have one per episode, the scorer `code` one per
answer. `kinds.make_sandbox` makes the kind that the config names. To add one, write a class with the interface in a
file here and a line in `kinds.py`; users give their own as `path.py:class`. docs/reference/sandbox.md says how well
each kind isolates.
"""
