"""A run: from checked settings to a trained model.

`start.py` opens a PPO run, `inputs.py` reads what it needs, `resume.py` finds where it continues, `agreement.py` checks
that engine and trainer have the same policy; `supervised.py` is the loop of fine-tuning and reward models. Read
`start.py` first, then `jppo/train.py`.
"""
