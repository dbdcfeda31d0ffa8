"""The reward model's own process. Torch is allowed here, and nowhere else in reward_loop."""
