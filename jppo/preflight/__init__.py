"""Before a run: its checks, its memory and its preview, for `--dry_run`, `jppo.doctor` and `jppo.plan`.

`checks.py` lists the checks, `memory.py` estimates memory from compiled programs, `preview.py` writes the report,
`auto.py` chooses settings by memory. Imports the parts of a run, not its start. Read `preview.py` first.
"""
