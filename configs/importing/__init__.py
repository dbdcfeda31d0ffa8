"""Reads a config of another project and writes ours, with the differences (`rl-async config from-verl` and the like).

In: a file of verl, TRL, prime-rl or slime. Out: our YAML with comments. Nothing is guessed silently: where the other
project's default differs from ours it is written out, and every value without a counterpart is named. Scripts are
worked out by `shell.py` and Python is parsed; neither is run. To add a source, write a file here with its keys as a
table, and a line in `importers.py`.
"""
