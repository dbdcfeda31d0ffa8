"""``rl-async doctor``: what a run waits for, or what this machine lacks.

``observe`` takes a snapshot of a run (``observation``), ``diagnosis`` derives findings from it as a pure function, and
``report`` prints both; the launcher calls it too, when a run is in trouble. Without a run, ``machine_check`` checks
this machine. To add a rule, write a function from an ``Observation`` to sentences and enter it in ``diagnosis.RULES``,
causes before effects.
"""
