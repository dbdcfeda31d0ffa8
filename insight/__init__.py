"""From a run's folder to what a person sees: the page, the live view, ``show``, the timeline, ``doctor``, evaluations.

In come the files that a run writes, and the answers of its queue and engines; out go text, JSON and pages. Nothing here
starts a process of a run or changes one. The command line calls it (``launcher/cli``), and ``launch`` shows its live
view. To add a view, read the run through ``tail``, ``roster`` and ``rl_async.recording``.
"""
