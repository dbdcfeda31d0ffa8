"""Sends weights to engines from the trainer ranks that hold them, without gathering them anywhere.

In: every rank's shards of a version, and what an engine's workers need. Out: rounds; in each, every rank sends each
worker one bucket with its share of the same few tensors. ``rounds`` decides who sends what, ``outlet`` is one rank's
end, ``remote`` lets rank 0 direct those of other ranks, and ``shipment`` is all of them together, as
``weight_sync.wave`` sees them; by ``meeting`` they find each other and leave together. Every rank works out the same
rounds for itself, so only commands and manifests travel between ranks.
"""
