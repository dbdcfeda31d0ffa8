"""Shows runs to people: the page, the live view, ``show``, the timeline, ``doctor``, evaluations.

It reads the files that a run writes, and queries its queue and engines; it produces text, JSON and pages. Nothing here
starts or changes a process of a run. The command line calls it (``launcher/cli``), and ``launch`` shows its live view.
To add a view, read the run through ``tail``, ``rl_async.process.run_files`` and ``rl_async.recording``.
"""
