"""Trains the policy on batches of the transfer queue and publishes its weights to the engines.

In come reserved batches and, on a resume, a checkpoint; out go weights, checkpoints, metrics and records. The launcher
starts one process per rank (``__main__.py``, built by ``process.py``); all run the loop in ``train.py``. A step is in
``step/``, its formulas in ``algorithms/``, the model behind ``backends/interface.py``.
"""
