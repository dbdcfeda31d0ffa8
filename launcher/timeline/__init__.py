"""The timeline of a run, what each process did when, for the page (``rl-async view``) and ``rl-async trace``.

``recorded`` reads the files of a run, ``lanes`` is pure and makes lanes of spans of what they hold, and ``perfetto``
writes these as a trace. To show another kind of time, record it (``rl_async.process.run_files``, or an ``Activity`` of
an episode) and give it a lane in ``lanes``.
"""
