"""``rl-async queue ...``: ``commands`` parses, ``actions`` connects to the queue and executes a command, ``text``
renders the queue's replies. To add a subcommand, add its parser to ``commands`` and its function to ``actions``.
"""
