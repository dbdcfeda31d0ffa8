"""Brings weights that lie in one layout over ranks into another, moving only what a rank does not hold yet.

In: two layouts (``weight_sync.layout``) and this rank's shards of the first. Out: this rank's shards of the second.
``plan`` decides which slice goes from where to where, ``execute`` carries the plan out over a ``wire``, and ``gather``
uses both to fill buckets of whole tensors on rank 0. ``model_layouts`` knows how Megatron-Core and engines cut
models.

To add a model family, add its tensors' names to ``model_layouts.KINDS``; to add a parallel layout, a function that
returns a ``Layout``.
"""
