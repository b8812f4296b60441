"""How a recipe ends: one line that says why, and a traceback only where the line cannot say it all."""

import pytest

from a3po_megatron.errors import UserError, exit_on_user_error, say_why
from a3po_megatron.rollout.control import ReplicaError


@pytest.mark.parametrize("error", [ReplicaError("replica a is broken"), TimeoutError("waited 3 s for b")])
def test_our_own_errors_and_timeouts_are_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert say_why(ExceptionGroup("two", [ExceptionGroup("one", [error]), ValueError("later")])) == 1
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (KeyError("x"), "error: KeyError: 'x'"),
        (TimeoutError(), "error: TimeoutError: "),
        (TimeoutError(110, "late"), "error: TimeoutError: [Errno 110] late"),
    ],
)
def test_any_other_error_has_its_traceback_before_the_line(
    error: Exception, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say_why(error) == 1
    lines = capsys.readouterr().err.splitlines()
    assert type(error).__name__ in "".join(lines[:-1])
    assert lines[-1] == last


def test_a_users_mistake_stays_one_even_in_a_group() -> None:
    with pytest.raises(UserError, match="is empty"):
        say_why(ExceptionGroup("group", [UserError("run.dir is empty")]))


def test_ctrl_c_is_one_line_and_the_shells_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise KeyboardInterrupt

    assert exit_on_user_error(main) == 130
    assert capsys.readouterr().err == "error: stopped by SIGINT\n"
