"""The process that serves a run's own reward model: token ids in, one number per conversation out.

The launcher starts it and the scorer `reward_model` calls its `/classify`. Torch is imported only here in reward_loop.
"""
