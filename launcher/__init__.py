"""The launcher: the command line, and the processes of a run on one machine or on Ray.

    config ──plan──> process specs ──supervisor or ray_nodes──> processes

Users call it as ``rl-async`` (``cli``). It may import every other package, and none imports it. ``insight`` shows the
processes to people.
"""
