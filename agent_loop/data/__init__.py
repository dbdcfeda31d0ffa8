"""Conversations and pairs to fine-tune on, and the generated data of the presets.

Fine-tuning and reward-model training read conversations (`chats.py`), preference pairs (`pairs.py`) and their tokens
(`training_tokens.py`); `rl-async data make` and warm starts use `toy_tasks.py` and `tiny_tokenizer.py`. To add a
generated task, write how it is drawn and demonstrated in `toy_tasks.py` and add it to `KINDS`. The data sets of tasks
that the transfer queue feeds from are in `transfer_queue/dataset.py`.
"""
