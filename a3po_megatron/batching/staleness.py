"""How old a token is: d = version - (the version that sampled it), here and nowhere else.

The bound on d is kept twice. At admission (`controller/admission.py`) no group is started that would have to wait for longer
than `max_staleness` versions. At consumption tokens that got too old all the same, because their group ran for longer than
its neighbours, are masked (`minibatches.py`) and counted. A group is never dropped for its age: the slow ones are the long
answers, and dropping them would bias training against hard problems.
"""

from a3po_megatron.records import Bool, Int32, Sample


def staleness(sample: Sample, version: int) -> Int32:
    """Return d of each response token [R] in a batch that is trained at `version`; below 0 for one that is newer."""
    return version - sample.versions


def is_overdue(sample: Sample, version: int, max_staleness: int) -> Bool:
    """Return which response tokens [R] are older than the bound in a batch that is trained at `version`."""
    return staleness(sample, version) > max_staleness
