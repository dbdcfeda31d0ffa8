"""The formulas: advantages, losses, off-policy correction, KL, shaping and aggregation, as pure functions of tensors.

They take tensors of whole batches or micro-batches, with shapes in the docstrings, and return tensors and metrics.
``update.py`` calls them through ``algorithm.Algorithm``, which ``build`` looks up from the config. To add a loss or an
advantage, write the function in ``losses.py`` or ``advantages.py``, name it in that file's table, declare its traits in
``configs/schema/algorithm.py``, and give the tests a reference in plain loops.
"""
