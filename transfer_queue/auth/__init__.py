"""Who may connect to the queue's sockets, and in which role.

Key files (``keys.py``), the list of clients with their roles (``allow_list.py``, ``roles.py``), the server's answers to
libzmq's questions over TCP (``authenticator.py``), socket files that need no encryption (``sockets.py``), and a
client's diagnosis of a failed handshake (``handshakes.py``).

In: key folders and the run's config. Out: socket options and roles. Servers (queue, shards) and clients use it.
"""
