"""From preset names, files and `a.b=c` arguments to one checked RunConfig, and the texts of `rl-async config explain`.

The command line and every role call `loader`; it fails with ConfigError, naming file and line. To rename a key without
leaving users alone with their old configs, add a line to `renamed.py`.
"""
