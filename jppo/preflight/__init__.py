"""Before a run: its checks, its memory and its preview, for `--dry_run`, `jppo.doctor` and `jppo.plan`.

`checks.py` lists the checks, `memory.py` estimates memory from compiled programs, `memory_budget.py` compares it with
the machine and chooses settings that fit, `preview.py` writes the report. Imports the parts of a run, not its start.
Read `preview.py` first.
"""
