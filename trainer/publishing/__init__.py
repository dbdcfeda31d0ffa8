"""The trainer's side of weight synchronisation: gathers weights, publishes them, and checks what engines sample from.

In: a version and the policy's backend, after a step. Out: engines that confirmed the version, and metrics ``sync/...``
and ``mismatch/...``. The training loop calls a ``Publisher`` on every rank. ``publisher`` gathers and sends through a
phase of ``weight_sync``; ``mismatch`` wraps a publisher and compares log-probabilities of ``canaries`` that engines
sample. To add a check of publications, write another wrapper with the same two methods.
"""
