"""Shipped run configurations, by name: `rl-async launch --config NAME`."""
