"""One trainer step on one batch, and what a rank keeps between steps.

In come a ``Batch``, the ``Models`` and the ``Algorithm``; out come changed weights, metrics, and what became of every
token. ``train.py`` calls ``update.update`` and the methods of ``run.Run``. To add a metric of the batch, extend
``metrics.batch_metrics``; one of the loss, ``objective.LossSums``.
"""
