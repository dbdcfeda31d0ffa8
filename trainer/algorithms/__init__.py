"""The formulas: advantages, losses, off-policy correction, KL, shaping and aggregation, as pure functions of tensors.

In go whole-batch or micro-batch tensors with their shapes in the docstrings; out come tensors and metrics.
``update.py`` calls them through ``algorithm.Algorithm``, which ``build`` looks up from the config. To add a loss or an
advantage, write the function in ``losses.py`` or ``advantages.py``, name it in that file's table, declare its traits in
``configs/schema/formulas.py``, and give the tests a reference in plain loops.
"""
