"""Machines that are not there: their compilers, the accounts of compiled programs, and forecasts of seconds.

`machines.py` is the one table of assumed rates. `compilers.py` compiles for a described device, `account.py` sums what
a program computes, holds and sends, and turns that into time. Read `account.py` first.
"""
