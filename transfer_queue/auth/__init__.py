"""Access to the queue's sockets, by key and role.

Key files, the server's answers to libzmq's questions over TCP and socket files that need no encryption (``keys.py``),
and the list of clients with their roles (``roles.py``), which the command line reads without libzmq.

In: key folders and the run's config. Out: socket options and roles. Servers (queue, shards) and clients use it.
"""
