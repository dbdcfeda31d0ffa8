"""SGLang: the client of its native HTTP API and, in ``__main__.py``, the process around an SGLang server.

None of our code runs inside SGLang: weights arrive through its own routes for torch process groups.
"""
