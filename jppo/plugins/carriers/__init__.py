"""Carriers of weights to vLLM without a file: TCP, NCCL and CUDA IPC, in buckets. Start with `buckets.py`."""
