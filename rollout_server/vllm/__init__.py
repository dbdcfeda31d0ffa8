"""vLLM: the client of its HTTP dialect, which the embedded engine speaks too, and our code inside a vLLM server.

``client.py`` runs in agent workers and in the trainer. ``__main__.py`` starts the server with the flags that training
needs, and ``versions.py`` adds what vLLM before 0.32 lacks; ``plugin.py``, ``slices.py`` (our weight transport) and
``int8.py`` are loaded by vLLM in its own processes. Nothing else imports vLLM.
"""
