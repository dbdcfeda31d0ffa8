"""Packs named tensors into flat byte buffers of bounded size, and takes them apart again on the engine.

In: tensors, or the empty buckets that a reshard fills. Out: ``Bucket``s (bytes and manifest) for a transport, and on
the other side ``Piece``s for an engine's loader. The publisher and the coordinator call the first half (``buckets``,
``delta``, ``adapters``, ``numbering``), ``receiver`` the second (``retained``, ``assembly``).

To add a kind of bucket beside full, delta and adapter: add it to ``UpdateInfo.kind``, encode it in a file of its own
here, and let ``RetainedBuckets`` or the receiver decode it.
"""
