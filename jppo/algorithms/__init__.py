"""The algorithms: small pure functions of arrays. jax.numpy only, no state, no config."""
