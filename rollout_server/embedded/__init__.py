"""The embedded engine: a Transformers model behind vLLM's HTTP dialect, with our own small scheduler."""
