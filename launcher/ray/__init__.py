"""Runs the processes of a plan on the nodes of a Ray cluster, for ``rl-async launch --launcher ray``.

``executor.RayNodes`` implements the interface of ``supervise.executor``; ``placement`` decides which processes share a
node, ``keeper`` runs on each node and keeps one process, ``remote_child`` controls it from the launcher, and
``authentication`` presents the user's token to the cluster. Only ``executor`` imports Ray. Another cluster manager
would be another executor.
"""
