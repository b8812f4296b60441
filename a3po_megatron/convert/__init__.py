"""Checkpoints from one format to another. Used by `tools/convert_checkpoint.py`; no role of a run imports this."""
