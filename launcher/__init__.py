"""The launcher: the command line, and the processes of a run on one machine or on Ray.

    config ──plan──> process specs ──supervise or ray──> processes ──watch, doctor──> terminal

Users call it as ``rl-async`` (``cli``). It may import every other package, and none imports it.
"""
