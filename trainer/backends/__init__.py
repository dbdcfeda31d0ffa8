"""A model spread over the trainer's ranks: forward passes, optimizer steps, checkpoints and the weights for engines.

In: micro-batches (``Tensors``) and a loss function. Out: ``Outputs`` per token, updated weights, and ``ShardedWeights``
that say which rank holds what. ``trainer.step`` and fine-tuning's loop call it through ``interface.Backend``. To add a
backend, implement that protocol in a folder here, build it in ``step/models.py``, and run ``tests/contracts/backends``.
"""
