"""The learner: packing, sharding, scoring and updates, from trajectories to gradients."""
