"""One episode: the conversation of a policy with its tools, from a task's prompt to the rows to train on.

A worker gives `runner.EpisodeRunner` a leased sample; it runs the sample's loop (`loops.py`), which drives an
`episode.Episode`, and returns its rows without a reward. In a game (`game.py`) there is a loop and an Episode for each
role that the policy plays. To add a loop, write a coroutine function that takes an
Episode and returns a finish reason, and add a line to `LOOPS`; users give their own as `path.py:name`.
"""
