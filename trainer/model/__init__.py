"""A Hugging Face language model with heads, and how its layers compute: attention, kernels, log-probabilities, LoRA.

In go packed or padded micro-batches; out come ``Outputs`` per token. The FSDP2 backend builds and shards these models.
To let rows of another kind of model be packed, add it to ``families.FAMILIES``; its test compares it with one row at a
time.
"""
