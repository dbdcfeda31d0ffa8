"""Shows runs on the terminal: ``view`` while one trains, ``finetune_view`` during fine-tuning, ``trajectory_view``
(``rl-async show``) the recorded trajectories of a step.

They read the files of the run folder and the queue's status, and change nothing. ``view_model`` computes what ``view``
shows, without a terminal; a new figure goes there first.
"""
