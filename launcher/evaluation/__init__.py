"""Recorded evaluations: read, compared task by task, and laid out as tables.

In go the held-out episodes of a run, as they were just played (``rl-async eval``) or as its folder has them; out come
tables for the terminal and the page. ``rl_async.evaluation`` has the statistics.
"""
