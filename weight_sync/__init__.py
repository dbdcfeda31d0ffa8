"""Moves weights from the trainer into running engines, and commits a version on all of them.

In: the trainer ranks' shards of a new version, or its buckets on rank 0. Out: engines that serve that version,
confirmed to the registry in the transfer queue, and a ``SyncReport``. The trainer calls ``coordinator`` (when engines
and trainer use their devices, which engines are updated in which groups; a thread with an event loop) -> ``wave`` (one
group, two phases) -> ``sender`` (who sends what) -> a transport. On the engine's side the server hands each request to
``receiver``.

``buckets`` packs tensors into byte buffers, ``layout`` and ``reshard`` bring weights from one layout over ranks into
another, ``transports/`` moves bytes. To add a transport, write its two sides and a line in ``transports/interface.py``.
"""
