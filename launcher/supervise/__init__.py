"""Starts the processes of a plan, restarts them, and ends them in order.

``supervisor`` knows the roles of a run, ``children`` keeps processes, whatever their roles, ``executor`` starts them on
this machine, ``process`` is one of them, and ``roster`` lists them in ``processes.json``. ``runs`` calls it. To add a
role, add a ``_keep_...`` method to the supervisor and start it in ``run``.
"""
