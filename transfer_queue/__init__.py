"""The transfer queue: the only shared state of a run."""
