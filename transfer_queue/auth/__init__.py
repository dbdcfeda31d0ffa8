"""CURVE authentication of the queue's sockets: key files (``keys.py``), the server's answers to libzmq's questions
(``authenticator.py``), and a client's diagnosis of a failed handshake (``handshakes.py``).

In: key folders and the run's config. Out: socket options and an allow-list. Servers (queue, shards) and clients use it.
"""
