"""A server of the Tinker API over `jppo.open`: start with `sessions.py`; docs/tinker.md is the user's page.

`jppo/tinker.py` is the command, `server.py` answers connections, `requests.py` turns requests into arguments of
`jppo.open`'s models, `sessions.py` keeps sessions and the queue, and `futures.py` has their contents.
"""
