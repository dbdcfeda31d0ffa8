"""The Megatron-Core backend: tensor-, pipeline-, data- and expert-parallel ranks with a distributed optimizer.

``backend`` implements ``interface.Backend``. ``parallel`` forms the process groups, ``model`` builds this rank's part
of the model, ``mapping`` and ``weights`` translate to and from Hugging Face tensors, ``attention`` and ``outputs``
compute on packed rows and split vocabularies, ``optimizer`` wraps Megatron's AdamW, and ``cpu`` lets all of it run
without a GPU. To add a model family, extend ``families`` and the rules in ``mapping``.
"""
