"""Trains the policy on batches of the transfer queue and publishes its weights to the engines.

It takes reserved batches and, on a resume, a checkpoint; it produces weights, checkpoints, metrics and records. The
launcher starts one process per rank (``__main__.py``, built by ``rank.py``); all run the loop in ``train.py``. A step
is in ``update.py``, its formulas in ``algorithms/``, the model behind ``backend.py``. To add a metric of the batch,
extend ``train.batch_metrics``; one of the loss, ``update.LossSums``; a tracker, write its function in ``trackers.py``
and add it to ``TRACKERS`` and the config's ``TrackerName``.
"""
