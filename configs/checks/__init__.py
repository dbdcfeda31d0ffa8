"""Rules that refuse configs which cannot work, before anything starts.

A rule takes the RunConfig and returns a message that names the keys and the way out, or None. `rules.check`, which the
loader calls, raises ConfigError with the messages of all broken rules. To add a rule, write it in the file of its
section and add it to the tuple at that file's end.
"""
