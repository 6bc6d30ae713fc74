"""A run: from checked settings to a trained model.

`command.py` has the command line, `start.py` opens a PPO run, `inputs.py` reads what it needs, `resume.py` finds where
it continues, `agreement.py` checks that engine and trainer have the same policy, `host_functions.py` calls an
algorithm's, `loop.py` is the loop of every training, `trained_model.py` writes the model; `supervised.py` is the run of
one model, `pairs.py` its form for preference pairs, `api/` the Python API for your own. Read `jppo/train.py` first,
then `loop.py` and `start.py`.
"""
