"""Every section of the config as a frozen struct, one file for a section or two; `run.py` puts them together.

The loader makes these structs, and every role reads them. To add a key, add a field with its description here and read
it where it takes effect: `rl-async config explain` and error messages find it by themselves.
"""
