"""SGLang: the client of its native HTTP API and, in ``__main__.py``, the process around an SGLang server.

Our code there is middleware around the server's routes, for the token, sleep and adapters (``adapters.py``). Weights
arrive through SGLang's own routes for torch process groups, and adapters as files.
"""
