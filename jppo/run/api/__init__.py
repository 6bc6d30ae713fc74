"""The Python API, `jppo.open`, for your own training loop (docs/your-own-loop.md).

`model.py` has the object that a loop calls; `inputs.py` its settings and prompts, `responses.py` batches, `losses.py`
the losses by name or as functions, `weights.py` what is trained, `engine.py` what samples.
"""
