"""``rl-async view``: a local, read-only page on runs, and ``rl-async report``: the same page as one file.

Run folders come in; JSON over HTTP, server-sent events and the built page in ``static`` go out. ``runs`` finds the
folders and follows their metrics, ``index`` keeps a table of their trajectories, which ``queries`` searches and counts,
``trajectories`` reads one of them, and ``page`` has the routes and decides who may ask. The page's sources are in
``web``; ``scripts/build_view`` builds them. To show something new, add its function here, a route in ``page`` and a
component in ``web``.
"""
