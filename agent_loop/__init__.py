"""Agent loops: tasks in, multi-turn conversations with engines and tools, scored trajectories out.

An agent worker (`worker.py`) leases groups from the transfer queue, plays their samples as episodes against the
engines, has the reward service score them and puts the trajectories into the queue. A gateway (`gateway/`) does the
same for agent programs that play the episodes themselves. `worker.py` also connects a worker to its peers.
To add a loop see `episode.py`, a tool `tools/`, an environment `environments/`, a tool-call format `chat_formats/`.
"""
