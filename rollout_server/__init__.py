"""Engines: what the system needs from one, the HTTP dialects that provide it, and the pool in front of them."""
