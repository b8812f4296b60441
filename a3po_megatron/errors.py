"""The one exception for a user's mistake, and how a recipe reports it."""

import sys
from collections.abc import Callable

USER_ERROR_EXIT_CODE = 2


class UserError(ValueError):
    """A setting, file or row is wrong. The message is one line: what it is, its value, the reason, the fix."""


def exit_on_user_error(main: Callable[[], int]) -> int:
    """Run `main` and return its exit code; a `UserError` becomes one line on stderr and exit code 2."""
    try:
        return main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR_EXIT_CODE
