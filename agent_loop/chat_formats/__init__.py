"""How conversations become tokens, and how models write tool calls.

Agent loops, gateways and fine-tuning use one `format.ChatFormat` each: it renders messages, reads what was sampled, and
extends a conversation without encoding anything twice. `render.ChatRenderer` follows the tokenizer's own chat template
and reads calls in a `CallSyntax`; `library.LibraryFormat` adapts the families of the package renderers. To add a
format, add a file, a line to `format_registry.py`, and its name to `ChatFormatName` in the config's schema.
"""
