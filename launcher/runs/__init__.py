"""The work behind the commands: training (``launch``), evaluation, fine-tuning, reward-model training, and the
preparation of a preset's data and model (``prepare``, ``tiny_model``).

Each takes a checked config from the command line, makes a run or model folder, and returns an exit code. To add a kind
of run, write a module here and a command for it in ``cli``.
"""
