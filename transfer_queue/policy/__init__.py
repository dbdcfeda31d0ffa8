"""Which tasks are admitted, what is leased and which groups a step takes: pure functions and the proof of the bound.

In: the settings and counts or candidates. Out: decisions. The store calls them. A sampling policy is an entry in
``sampling.ORDERS``, and a name in the config's schema.
"""
