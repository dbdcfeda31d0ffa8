"""The queue's server: one thread that answers requests from the store and flushes the journal before it replies.

In: frames from clients (``loop.py``), checked by ``gate.py``. Out: responses, and the store's transitions. The queue's
process runs it, and ``standalone.py`` does without a run. A verb is a row of the table in ``verbs.py``.
"""
