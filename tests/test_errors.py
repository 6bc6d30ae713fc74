"""Errors as a terminal shows them."""

import pytest

from jppo import errors
from jppo.errors import UserError, UserErrors


def test_control_characters_are_shown_and_not_obeyed():
    assert errors.escaped("a\x1b[2Jb\tc\nd é\u202e\ud800") == "a\\x1b[2Jb\tc\nd é\\u202e\\ud800"


def test_every_mistake_has_a_line():
    assert errors.one_line(UserErrors(["a=1: wrong\nhere", "b=\x07"])) == "error: a=1: wrong\\nhere\nerror: b=\\x07"
    assert errors.one_line(UserError("c")) == "error: c"


def test_mistakes_of_several_checks_are_raised_together_each_once():
    def check(*faults):
        def failing():
            errors.raise_faults(list(faults))

        return failing

    faults = errors.faults_of([check("a"), check(), check("b", "a"), check("c")])
    assert faults == ["a", "b", "c"]
    with pytest.raises(UserErrors, match="a; b; c"):
        errors.raise_faults(faults)
    with pytest.raises(UserError) as e:
        errors.raise_faults(["a"])
    assert not isinstance(e.value, UserErrors)


def test_a_home_folder_that_nobody_has_is_a_mistake():
    with pytest.raises(UserError, match="~nobody-here is no user's home folder"):
        errors.expanded("~nobody-here/run")
    assert errors.expanded("~/run").is_absolute()
