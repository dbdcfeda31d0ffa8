"""The queue's state machine, pure: no sockets, files or clock. ``store.py`` joins the parts.

In: verbs with the time. Out: replies, and transitions, which are the only way in which the state changes. The server
and journal recovery call it. To add a change, declare a transition, emit it from a verb, and list its effect in the
``effects`` of the part that it concerns.
"""
