"""From groups of samples to what a training step consumes (numpy only)."""
