"""Configs to start from by name (`rl-async launch --config NAME`). To add one, add a YAML file; tests parse all."""
