"""The HTTP dialects of agent programs: requests in as chat messages, answers of the policy out as bodies or events.

Everything here is pure.
`chat.py` has the form that all of them share, `fields.py` as data what becomes of each field that a run does not obey.
To add a dialect, write its requests and answers in a file beside `openai.py`, its fields in a table of `fields.py`, and
its routes in `../server.py`.
"""
