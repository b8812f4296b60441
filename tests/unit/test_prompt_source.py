"""The prompt source: order, epochs, cursor."""

import numpy as np
import pytest

from a3po_megatron.data.source import PromptSource
from a3po_megatron.errors import UserError
from a3po_megatron.records import Problem


def problems(count: int, answer: str = "0") -> list[Problem]:
    return [Problem(f"p{i}", np.array([i], dtype=np.int32), answer) for i in range(count)]


def drawn(source: PromptSource, count: int) -> list[tuple[int, int, str]]:
    draws = [source.draw() for _ in range(count)]
    return [(draw.index, draw.epoch, draw.problem.id) for draw in draws]


def test_every_epoch_has_every_problem_once_in_another_order() -> None:
    draws = drawn(PromptSource(problems(20), seed=3), 60)
    assert [index for index, _, _ in draws] == list(range(60))
    assert [epoch for _, epoch, _ in draws] == [0] * 20 + [1] * 20 + [2] * 20
    orders = [tuple(problem for _, epoch, problem in draws if epoch == e) for e in range(3)]
    assert all(sorted(order) == sorted(f"p{i}" for i in range(20)) for order in orders)
    assert len(set(orders)) == 3


def test_the_order_depends_on_the_seed_only() -> None:
    assert drawn(PromptSource(problems(20), 3), 50) == drawn(PromptSource(problems(20), 3), 50)
    assert drawn(PromptSource(problems(20), 3), 50) != drawn(PromptSource(problems(20), 4), 50)


@pytest.mark.parametrize("before", [0, 7, 20, 33])  # 20 is the boundary of an epoch
def test_a_restored_cursor_goes_on_where_it_was(before: int) -> None:
    source = PromptSource(problems(20), seed=3)
    drawn(source, before)
    resumed = PromptSource(problems(20), seed=3)
    resumed.restore(source.state())
    assert drawn(resumed, 30) == drawn(source, 30)


def test_any_draw_can_be_looked_up_without_moving_the_cursor() -> None:
    source = PromptSource(problems(20), seed=3)
    draws = [source.draw() for _ in range(50)]
    assert [source.at(index) for index in (7, 44, 0, 20)] == [draws[index] for index in (7, 44, 0, 20)]
    assert source.draw().index == 50


def test_a_cursor_of_other_data_or_another_seed_is_refused() -> None:
    state = PromptSource(problems(20), seed=3).state()
    with pytest.raises(UserError, match=r"data's seed is 4, the saved cursor's is 3"):
        PromptSource(problems(20), seed=4).restore(state)
    with pytest.raises(UserError, match="fingerprint"):
        PromptSource(problems(20, answer="1"), seed=3).restore(state)


def test_no_problems_or_one_id_twice_is_refused() -> None:
    with pytest.raises(UserError, match="no training problems"):
        PromptSource([], seed=0)
    with pytest.raises(UserError, match="'p1' occurs twice"):
        PromptSource([*problems(3), *problems(3)[1:2]], seed=0)
