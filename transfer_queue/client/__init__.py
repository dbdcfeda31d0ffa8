"""Clients of the queue: ``async_client.py`` for event loops and ``sync_client.py`` for threads, with their methods in
one table (``verbs.py``), and readers that loop over batches or trained groups (``readers.py``).

In: requests of agent workers, trainer, launcher and users. Out: replies, and rows from the queue or its payload shards.
A verb is a line in ``verbs.py``; one that takes several requests is a generator in ``conversations.py``.
"""
