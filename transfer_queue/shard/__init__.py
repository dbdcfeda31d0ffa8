"""Payload shards: processes that keep rows in memory between workers and trainer ranks, beside the queue.

In: rows of finished samples. Out: the same rows. Workers and readers reach them through their clients; the queue says
which groups can be deleted.
"""
