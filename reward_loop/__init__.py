"""Rewards: finished trajectories in, a reward and its parts out.

Agent workers and gateways call `service.RewardService`, which runs the scorers of `reward.functions` with deadlines
and limits; a failing scorer only marks its trajectory. `server/` serves the run's own reward model. To add a
scorer, write a function of a `Conversation` in `scorers/` and add a line to `scorers/scorer_registry.py`.
"""
