"""Prefetched samples: requests ahead of training, and which samples a step trains on."""
