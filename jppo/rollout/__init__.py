"""Sampling by an external engine, and handing it the weights."""
