"""Lets programs that are not ours play episodes, through OpenAI's and Anthropic's HTTP dialects.

An agent program posts to `/episodes`, talks to the policy at the episode's own base URL, and ends it with a reward. The
gateway leases samples from the queue for it, records exactly what the engines sampled (`gateway_episode.py`) and puts
the rows into the queue. `openai.py`, `responses.py` and `anthropic.py` have the dialects, the
requests and answers of its clients; `chat.py` has the form that they share."""
