"""Writes checkpoints while training goes on, finds the newest undamaged one, and exports models from them.

In: backends, whose state each rank stages, and the queue's snapshot. Out: folders ``step-NNNNNN`` (``folder`` has their
format) and Hugging Face folders. Training loops call ``saver``; processes that resume call ``folder``; ``rl-async
export`` calls ``export``. ``shards`` holds tensors of all ranks, ``adapters`` PEFT's files, ``manifest`` the checksums.
To add a file to a checkpoint, write it in ``Saver._own_files`` or in a backend's ``stage``; the manifest covers it by
itself.
"""
