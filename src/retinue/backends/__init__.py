"""What can execute a run."""
