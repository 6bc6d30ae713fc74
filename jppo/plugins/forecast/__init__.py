"""Reports of dry runs, machines that are not there, forecasts of seconds, and the search of `jppo.plan`.

`machines.py` is the one table of assumed rates. `compilers.py` compiles for a described device, `account.py` sums what
a program computes and sends, and turns that into time; `outlook.py` adds up a step, `report.py` prints it. Read
`account.py` first.
"""
