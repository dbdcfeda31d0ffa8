"""The parts that processes share: start and end of a role (``role``), lifeline to the supervisor, log format, stacks on
request, heartbeats of trainer ranks, addresses of a run, the guard that ends servers with their worker, and the
kernel's view of a process.

Roles call ``role.run_role`` from their ``__main__.py``; the launcher reads what they write. A new role gets its exit
codes and its logging from ``run_role``.
"""
