"""A server of the Tinker API over `jppo.open`: start with `sessions.py`; docs/tinker.md is the user's page.

`wire.py` has the binary messages, `requests.py` turns requests into arguments of `jppo.open`'s models, `sessions.py`
keeps sessions and the queue, `http.py` answers connections, and `__main__.py` is the command.
"""
