"""Starts and stops the processes of a run on this machine."""
