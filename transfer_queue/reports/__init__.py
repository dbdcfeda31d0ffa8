"""What the queue leaves for people and other tools: the ledger, its audit, Parquet files and Prometheus metrics.

In: transitions (``ledger.py``), files of a run (``audit.py``) or a client (``parquet.py``, ``metrics.py``). Called by
the queue's process, ``rl-async queue`` and tests.
"""
