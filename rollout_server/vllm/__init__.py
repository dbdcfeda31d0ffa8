"""vLLM: the client of its HTTP dialect, which the embedded engine speaks too, and what runs inside a vLLM server.

``client.py`` and ``coalesce.py`` run in agent workers and in the trainer. ``__main__.py`` starts the server with the
flags that training needs; ``plugin.py`` and ``transfer.py``, our weight transport, are loaded by vLLM in its own
processes. Nothing else imports vLLM.
"""
