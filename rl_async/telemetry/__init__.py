"""Metrics of a run's processes for Prometheus.

In: numbers that the parts of a process count anyway, read when Prometheus asks. Out: ``GET /metrics`` on one port of
each process, and files that tell Prometheus where these are. To add a metric, yield it in the collector of its role.
"""
