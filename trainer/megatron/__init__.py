"""The Megatron-Core backend: tensor-, pipeline-, data- and expert-parallel ranks with a distributed optimizer.

``backend`` implements ``trainer.backend.Backend``: passes through the pipeline, router replay, and a CPU to try it
on. ``model`` forms the process groups and builds this rank's part of the model with its outputs. ``mapping``
translates names and ranges to Hugging Face tensors and back, ``weights`` reads, trains, saves and publishes them, and
``packed_attention`` computes on packed rows. To add a model family, extend ``trainer/families.py`` and the rules in
``mapping``.
"""
