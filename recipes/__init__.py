"""What a user runs. Each file parses its settings, builds, and runs: a screen each."""
