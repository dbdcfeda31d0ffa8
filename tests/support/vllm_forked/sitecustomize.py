"""Forks vLLM's engine and workers, in processes with this folder in PYTHONPATH, from the server that imported vLLM.

On a CPU vLLM starts each as a new interpreter, and imports of vLLM are most of a start: 27 s of processor time for one
worker, forked 10 s.
"""

from multiprocessing import context

context._concrete_contexts["spawn"] = context._concrete_contexts["fork"]  # type: ignore[attr-defined]
