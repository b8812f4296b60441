"""How good a model is: problems x samples -> pass@1, avg@n, pass@k with standard errors, and what was answered."""
