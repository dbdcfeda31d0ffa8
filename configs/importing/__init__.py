"""Reads a config of another project and writes ours, with what differs (`rl-async config from-verl` and the like).

In: a file of verl, TRL, prime-rl or slime. Out: our YAML with comments. Nothing is guessed silently: what another
project does by default and ours does not is written out, and every value without a counterpart is named. A source is a
file here with its keys as a table, and a line in `importers.py`.
"""
