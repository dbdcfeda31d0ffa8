"""Agent loops: tasks in, multi-turn conversations with engines and tools, scored trajectories out."""
