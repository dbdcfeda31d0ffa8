"""Supervised training: fine-tuning on conversations, the warm start of the tiny model, and reward-model training.

*Fine-tuning* (command ``rl-async sft``, config section ``finetune``) runs as trainer ranks of its own: in,
conversations that the launcher encoded (``chat_rows``); out, checkpoints and a Hugging Face folder. ``loop`` builds the
parts of a rank, finds where to continue, and trains. *Warm start* (section ``warm_start``) and *reward-model training*
are functions that the launcher calls in its own process. To add another kind of supervised training, write its loss and
loop in a file here and call it from ``launcher/runs``.
"""
