"""The one exception for a user's mistake, and how a recipe says why it ends."""

import sys
import traceback
from collections.abc import Callable

USER_ERROR_EXIT_CODE = 2
FAILURE_EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130  # as a shell says it


class UserError(ValueError):
    """A setting, file or row is wrong. The message is one line: what it is, its value, the reason, the fix."""


def exit_on_user_error(main: Callable[[], int]) -> int:
    """Run `main` and return its exit code; a `UserError` becomes one line on stderr and exit code 2, Ctrl-C one and 130."""
    try:
        return main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR_EXIT_CODE
    except KeyboardInterrupt:
        print("error: stopped by SIGINT", file=sys.stderr, flush=True)
        return INTERRUPTED_EXIT_CODE


def say_why(error: BaseException) -> int:
    """Print what ended a recipe, its reason in the last line, and return the exit code of a failure.

    Our own errors and the timeouts of our waits say all there is to say in that line; before any other comes its traceback. Of an
    exception group the first cause counts. Raises that cause when it is a `UserError`.
    """
    cause = first_cause(error)
    if isinstance(cause, UserError):
        raise cause from None
    is_wait = isinstance(cause, TimeoutError) and cause.errno is None  # the system's own have a number
    if (type(cause).__module__.startswith("a3po_megatron.") or is_wait) and str(cause):
        print(f"error: {cause}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(cause)
        print(f"error: {type(cause).__name__}: {cause}", file=sys.stderr, flush=True)
    return FAILURE_EXIT_CODE


def first_cause(error: BaseException) -> BaseException:
    """Return the exception inside (nested) exception groups that came first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
