"""Moves weights from the trainer into running engines, and commits a version on all of them.

In: the trainer ranks' shards of a new version, or its buckets on rank 0. Out: engines that serve that version,
confirmed to the registry in the transfer queue, and a ``SyncReport``. The trainer calls ``coordinator``, which decides
when engines and trainer use their devices and updates engines in groups, from a thread with an event loop. It calls
``wave`` for each group's two phases, and that calls ``sender``, where each rank works out its share, and a transport.
On the engine's side the server hands each request to ``receiver``.

``buckets`` packs tensors into byte buffers, ``layout`` and ``reshard`` bring weights from one layout over ranks into
another, ``transports`` moves bytes. To add a transport, write its two sides and a line in ``transports.py``.
"""
