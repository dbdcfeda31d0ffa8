"""What an evaluation means: means with intervals, pass@k, and whether two differ by more than chance.

In go the held-out episodes of a run, as they were just played (``rl-async eval``) or as its folder has them; out come
tables for the terminal and the page.
"""
