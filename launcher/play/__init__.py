"""``rl-async play``: runs an agent program as it is for each episode of a run, and grades what it did.

`player.py` leases episodes from the gateway, several at once. For each, `program.py` starts a keeper process
(`keeper.py`), which starts the agent program in a workspace of its own, and in the end kills whatever is left of it and
removes the workspace, also if ``play`` itself was killed. `grading.py` turns the outcome into a reward.
"""
