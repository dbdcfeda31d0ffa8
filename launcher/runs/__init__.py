"""What the commands run: training (``launch``), evaluation, fine-tuning, reward-model training, and the preparation of
a preset's data and model (``prepare``, ``tiny_model``).

In comes a checked config; out goes an exit code and a run or model folder. The command line calls them. To add a kind
of run, write a module here and a command for it in ``cli``.
"""
