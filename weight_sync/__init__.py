"""Weights from the trainer into running engines: buckets, transports, and the coordinator that commits a version."""
