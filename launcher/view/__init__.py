"""``rl-async view``: a local, read-only page on runs, and ``rl-async report``: the same page as one file.

Run folders come in; JSON over HTTP, server-sent events and the built page in ``static`` go out. ``runs`` finds the
folders, ``columns`` follows their metrics, ``index`` keeps a table of their trajectories, which ``search`` queries,
``trajectory`` and ``evaluation`` compute what one page shows, ``access`` decides who may ask, and ``server`` has the
routes. The page's sources are in ``web``; ``scripts/build_view`` builds them. To show something new, add its function
here, a route in ``server`` and a component in ``web``.
"""
