"""How conversations become tokens, and how models write tool calls.

`render.ChatRenderer` turns messages into token ids by the tokenizer's own chat template, for agent workers, gateways
and fine-tuning. A `ChatFormat` says how one family of models writes tool calls. To add a format, declare one in a file
of its own and add a line to `registry.py`.
"""
