"""Starts, watches and ends the roles of a run on this machine; says what a job on a cluster must satisfy before its roles start."""
