"""The tasks of a run: data sets are read row by row (``dataset.py``) and mixed into one endless stream with a cursor
(``task_stream.py``), from which the queue admits.

In: the config's ``data`` section. Out: ``Task``s, to the queue's process; rows and messages, to the readers of
conversations and pairs in ``agent_loop/data``. To read another kind of file, implement ``Rows`` and name it in
``open_rows``.
"""
