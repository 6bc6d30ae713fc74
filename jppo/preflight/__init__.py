"""Before a run: its checks and its memory, for `--dry_run`, `jppo.doctor` and settings that memory chooses.

`checks.py` lists the checks, `memory.py` estimates memory from compiled programs, `memory_budget.py` compares it with
the machine and chooses settings that fit. Imports the parts of a run, not its start. Read `preview.py` first.
"""
