"""OpenAI's Responses dialect: requests in (`requests.py`), responses out (`answers.py`), whole or as events.

A request becomes the same chat messages as a chat completion would have, so it is recorded in the same rows. Output
items of one answer (reasoning, message, calls) are one message of the assistant; `kept.py` remembers answers, to which
later requests of the episode may refer by id.
"""
