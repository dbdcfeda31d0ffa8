"""The trainer: THE loop (train.py), the model backend, and the algorithms as pure functions."""
