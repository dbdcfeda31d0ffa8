"""The Megatron-Core backend: tensor-, pipeline-, data- and expert-parallel ranks with a distributed optimizer.

``backend`` implements ``interface.Backend``. ``parallel`` forms the process groups, ``model`` builds this rank's part
of the model, ``mapping``, ``slices`` and ``weights`` translate to and from Hugging Face tensors, ``passes`` runs
micro-batches through the pipeline, ``attention``, ``outputs`` and ``routing`` compute on packed rows, on parts of a
vocabulary and with recorded experts, ``optimizer`` wraps AdamW, ``checkpoint`` saves and continues, and ``cpu`` lets
all of it run without a GPU. To add a model family, extend ``families`` and the rules in ``mapping``.
"""
