"""A critic fitted on the samples that runs have logged, for `critic.path`. Start with `fit.py`"""
