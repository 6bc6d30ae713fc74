"""A run: from checked settings to a trained model.

`start.py` opens a PPO run, `inputs.py` reads what it needs, `resume.py` finds where it continues, `agreement.py` checks
that engine and trainer have the same policy, `loop.py` is the loop of every training; `supervised.py` is the run of one
model, `pairs.py` its form for preference pairs. Read `start.py` first, then `jppo/train.py`.
"""
