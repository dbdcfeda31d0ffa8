"""The built-in scorers and users' own: a conversation in, a number out.

`scorer_registry.get_scorer` finds them by name for the service. To add one, write a function of a `Conversation` in a
file here and add a line to `BUILT_IN`; the entry says whether it runs on the event loop or in a process."""
