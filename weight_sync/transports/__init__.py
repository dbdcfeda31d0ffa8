"""Carries buckets from the trainer to a group of engines: gloo, NCCL, shared memory or files.

In: buckets, one after another, from ``wave``. Out: the same bytes on each engine, for ``receiver`` to verify. A
transport is a ``Sender`` and a ``Receiver`` (``interface``); to add one, write both in a file here, add a line to
``interface.TRANSPORTS``, its name to ``protocol.TransportName`` and to the config's ``weight_sync.transport``.
"""
