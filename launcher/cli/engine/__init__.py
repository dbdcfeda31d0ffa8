"""``rl-async engine ...``: ``commands`` parses, ``membership`` changes the engines of a run, ``verification`` compares
an engine's log-probabilities with a forward pass. To add a subcommand, add its parser and function to ``commands``.
"""
