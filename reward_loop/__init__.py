"""Rewards: scorers over one trajectory, and the service that runs them with deadlines and limits."""
