"""Journals: the durable record of transitions and payloads, where a restarted queue continues.

In: transitions of the store and rows of samples. Out: on start, a dump with the transitions after it. The queue's
process opens one (``transfer_queue/__main__.py``). To add a backend, implement ``Journal`` (``journal.py``), pass the
tests in ``tests/contracts/queue_storage``, and name it in ``open_journal`` and in the config's schema.
"""
