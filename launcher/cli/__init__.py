"""The command line ``rl-async``. It takes words and returns an exit code: 0, 1 for a failure, 2 for a user's mistake.

To add a command, write a function that adds its arguments and sets ``command``, in the module of its group, and enter
it in ``__main__.COMMANDS``. Import the command's modules inside the function that runs it: ``--help`` must stay fast.
"""
