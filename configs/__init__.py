"""The configuration of a run: schema, presets, loading, checks and derived values.

In: a preset or YAML file and command-line overrides. Out: a frozen `RunConfig`, which every role loads from its run
folder. A new key goes into `schema/`, a rule about keys into `checks.py`, a preset as a YAML file into `presets/`.
"""
