"""Ten steps of the demo under every method, from the batches of a real run, against what that run logged.

Recorded by `python -m tests.golden.record`. One rank and four must both come to the numbers of the run.
"""

import pytest
import torch

from tests.golden.replay import replay
from tests.golden.settings import METHODS, NUM_STEPS, TOLERANCE
from tests.golden.stored import column_names, read

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the golden numbers are those of a CPU")
ONE_RANK = pytest.param((), id="TP1", marks=pytest.mark.ranks(1))
FOUR_RANKS = pytest.param(
    ("actor.tensor_parallel=2", "actor.pipeline_parallel=2", "actor.sequence_parallel=true"), id="TP2+PP2+SP"
)


@pytest.mark.parametrize("layout", [ONE_RANK, FOUR_RANKS])
@pytest.mark.parametrize("method", METHODS)
def test_ten_steps_of_the_demo_come_out_as_recorded(method: str, layout: tuple[str, ...]) -> None:
    rows, steps = replay(method, *layout), read(method)
    assert len(rows) == len(steps) == NUM_STEPS
    for name in column_names(method):
        found, golden = [row[name] for row in rows], [step.columns[name] for step in steps]
        assert found == pytest.approx(golden, **TOLERANCE), name
