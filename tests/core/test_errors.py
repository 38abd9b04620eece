"""Errors: what they say, and that they point at the user's line."""

import sys

import pytest

from tilegrad.core import errors
from tilegrad.core.dtype import dtype_of


def test_user_error_says_op_expected_got_line_and_hint():
    with pytest.raises(errors.UserError) as caught:
        raise errors.ShapeError("sizes differ", op="add", expected=3, got=4, hint="reshape it")
    line = caught.traceback[0].lineno + 1
    assert str(caught.value).split("\n") == [
        "add: sizes differ",
        "  expected: 3",
        "  got: 4",
        f"  at {__file__}:{line}",
        "  hint: reshape it",
    ]


def test_location_is_the_innermost_user_frame():
    with pytest.raises(errors.DTypeError) as caught:
        dtype_of("nonsense")  # raised inside tilegrad, located here
    assert caught.value.location.file == __file__
    assert caught.value.location.line == sys._getframe().f_lineno - 2


@pytest.mark.parametrize("prompt", ["<stdin>", "<python-input-3>", "<ipython-input-3-ab12>"])
def test_a_line_typed_at_a_prompt_is_the_users(prompt):
    with pytest.raises(errors.DTypeError) as caught:
        exec(compile("\ndtype_of('nonsense')", prompt, "exec"), {"dtype_of": dtype_of})
    assert f"at {prompt}:2" in str(caught.value)


def test_pythons_own_files_and_what_called_a_command_are_no_users():
    library, package = errors.LIBRARY, errors.PACKAGE
    assert errors._owner(library + "functools.py") == errors._owner("<frozen runpy>") == errors.OURS
    assert errors._owner(package + "ir/node.py") == errors.OURS
    assert errors._owner(library + "site-packages/theirs/model.py") == errors.USERS
    assert errors._owner(package + "cli/explain.py") == errors.NOBODYS


def test_a_given_location_wins():
    where = errors.Location("model.py", 12)
    assert "at model.py:12" in str(errors.UserError("no", location=where))


@pytest.mark.parametrize(
    "kind,builtin",
    [
        (errors.ShapeError, ValueError),
        (errors.DTypeError, TypeError),
        (errors.AxisError, IndexError),
        (errors.StateError, RuntimeError),
        (errors.TraceError, RuntimeError),
        (errors.MemoryLimitError, MemoryError),
    ],
)
def test_kinds_are_also_the_python_errors_people_catch(kind, builtin):
    assert issubclass(kind, errors.UserError)
    assert issubclass(kind, builtin)


def test_internal_error_names_the_pass():
    error = errors.InternalError("fuse", "lost a Node")
    assert error.where == "fuse"
    assert "internal error in fuse: lost a Node" in str(error)
    assert not isinstance(error, errors.UserError)


def test_what_a_user_gave_is_shortened():
    """Whatever part of an error it is in; the attributes keep it whole."""
    given = "start" + "x" * 10**6 + "end"
    error = errors.UserError(given, op="run", expected=given, got=given, hint=given)
    text = str(error)
    assert len(text) < 5000 and text.count("start") == text.count("end (1000008 characters)") == 4
    assert error.got == given
    assert errors.shortened("y" * errors.MOST_SHOWN) == "y" * errors.MOST_SHOWN
