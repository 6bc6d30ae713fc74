"""From settings to the parts of a run. Below it no module reads the settings."""
