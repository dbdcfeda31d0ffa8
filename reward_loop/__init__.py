"""Rewards: finished conversations in, a number and its parts out, whatever a scorer does."""
