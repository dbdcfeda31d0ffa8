"""``rl-async view``: a local, read-only page on runs, and ``rl-async report``: the same page as one file.

From run folders it makes JSON over HTTP, server-sent events and the built page in ``static``. ``index`` keeps a
table of trajectories, which it searches and counts, ``trajectories`` reads single ones, and ``page`` finds the folders,
follows their metrics, has the routes and authorises requests. The page's sources are in
``web``; ``scripts/build_view`` builds them. To show something new, add its function here, a route in ``page`` and a
component in ``web``.
"""
