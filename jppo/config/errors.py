"""The one error that a user can mend."""


class UserError(Exception):
    """Something that the user can mend: one line of value, rule and remedy. Commands print it and exit with 2."""
