"""The output of a run: metrics, console, warnings, samples, checkpoints.

`logger.py` sends metrics to the sinks, `console.py` shows them, `diagnosis.py` warns, `checkpoint.py` saves and
`checkpoint_arrays.py` reads states; `watchdog.py` ends a run on a signal or when a stage is stuck. Read `logger.py`
first.
"""
