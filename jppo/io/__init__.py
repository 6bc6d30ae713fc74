"""What a run leaves on disk and shows on the screen."""
