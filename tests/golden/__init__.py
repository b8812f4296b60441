"""Golden runs: what ten lockstep steps of the demo logged under each method, and the batches that they were trained on.

settings.py     which runs
record.py       python -m tests.golden.record: the real runs, with vLLM -> recorded/METHOD.jsonl
controller.py   their controller, which also keeps each batch
stored.py       the files below recorded/, one line a step
replay.py       stored batches -> the actor -> rows, to be compared with the stored ones
"""
