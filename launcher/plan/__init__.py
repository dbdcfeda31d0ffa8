"""The plan of a run: from a config to the processes to start, with their devices, ports and memory.

``planning.plan`` is pure; ``machine.plan_here`` first checks that this machine can execute it. ``runs`` passes the plan
to an executor, and ``launch --dry-run`` prints it. To add a process, write a function that returns its
``ProcessSpec``, and enter it in ``planning.plan`` and its memory in ``memory``; the supervisor needs a method for it.
"""
