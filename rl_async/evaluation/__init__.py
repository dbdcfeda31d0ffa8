"""Statistics of held-out episodes: means with 95 % intervals, pass@k, paired tests.

In go rewards by data source, task and role; out come summaries. The trainer records them while a run goes on, and
``rl-async eval``, ``compare`` and the page compute them from recorded episodes: they agree, since this is the only
implementation. To add an estimate, put its formula into ``statistics.py`` and a field into ``summary.Summary``.
"""
