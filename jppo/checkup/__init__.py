"""What would stop a run by given settings: each check by itself, for `jppo.doctor`."""
