"""Where batches come from and what they become before a model reads them.

In come headers and payloads from a ``BatchSource``; out go a ``Batch`` with its layout over ranks, and ``Tensors`` for
each forward pass. ``train.py`` takes batches, ``step/`` and ``finetune/`` lay them out and collate them, backends pack
them, with shared prefixes (``prefixes``) where they can. To add a source, implement ``sources.BatchSource`` and choose
it in ``process.py``.
"""
