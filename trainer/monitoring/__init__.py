"""Everything around the training loop that observes or records it, and the life of a rank's process.

In: metrics, rows and queue status of each step. Out: files in the run folder (``records``), metrics sent to
destinations (``trackers``), evaluations (``evaluation``), and warnings or bounds on staleness (``guard``,
``queue_depth``). ``ranks`` joins the process group, ``stopping`` handles requests to end early. To add a tracker, write
its function in ``trackers`` and add it to ``TRACKERS`` and the config's ``TrackerName``.
"""
