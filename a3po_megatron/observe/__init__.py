"""What a run shows and leaves: the live progress line, the report. Reads the files of a run, never the roles."""
