"""The scorer `math`: whether an answer means the same as the ground truth; docs/reference/math.md decides the forms.

`scorer` finds what both texts state, `answers` reads and compares it by kind (quantities, lists, relations, words),
`expressions` evaluates what stands in them, with the arithmetic of `values` and the table of `units`. To add a unit,
add it to that table; to add a function, add it to those of `expressions`.
"""

from rl_async.reward_loop.scorers.math.scorer import score

__all__ = ["score"]
