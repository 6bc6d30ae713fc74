"""From trajectories to gradients: packing, sharding, scoring, updating."""
