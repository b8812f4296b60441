"""From samples to microbatches, in numpy."""
