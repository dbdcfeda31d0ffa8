"""Capacity planning, ``rl-async plan``: simulates a run for each split of devices between trainer and engines.

In comes a config and, optionally, a recorded run that costs are measured on; out goes a table of throughput, idleness,
staleness and memory. The command line calls ``planner.plan_devices``. A new cost goes into ``costs.Costs`` and where
``simulation`` spends it.
"""
