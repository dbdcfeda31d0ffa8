"""Run folders: naming, creating and locking them (``run_folder``), and following the files in them (``tail``).

The command line comes in with a config and a name, and goes out with a folder; ``watch``, ``doctor`` and ``capacity``
read its files. A new file of a run belongs to the package that writes it.
"""
