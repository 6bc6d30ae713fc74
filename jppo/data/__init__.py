"""Prompts: from files to token ids in a resumable order.

`rows.py` reads rows, `tokenizer.py` renders chats, `prompts.py` makes `Prompt`s of them, `stream.py` orders them and
remembers the place, `memory.py` has what user-defined orders and algorithms remember of them. The commands that convert
published data sets are here too. Imports settings, and no model. Read `prompts.py` first.
"""
