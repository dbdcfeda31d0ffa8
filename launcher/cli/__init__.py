"""The command line ``rl-async``. In come words, out goes an exit code: 0, 1 for a failure, 2 for a mistake of the user.

To add a command, write a function that adds its arguments and sets ``command``, in the module of its group, and enter
it in ``__main__.COMMANDS``. Import what the command needs inside the function that runs it: ``--help`` must stay fast.
"""
