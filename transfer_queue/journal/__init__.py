"""Journals: the durable record of transitions and payloads, from which a restarted queue continues.

In: transitions of the store and rows of samples. Out: on start, a dump with the transitions after it. The queue's
process opens one (``opener.py``). To add a backend, implement ``Journal`` (``interface.py``), pass the tests in
``tests/contracts/queue_storage``, and name it in ``opener.py`` and in the config's schema.
"""
