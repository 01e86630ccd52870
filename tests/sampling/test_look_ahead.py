"""Regular expressions with look-aheads, against the same without."""

import itertools
import re

import pytest

from jaxserve.look_ahead import without_look_aheads


def texts(alphabet, longest):
    for length in range(longest + 1):
        yield from map("".join, itertools.product(alphabet, repeat=length))


@pytest.mark.parametrize(
    ("pattern", "alphabet"),
    [
        (r"^(?!\.)(?!.*\.\.)([a+\.]*)[a+]@(a+\.)+a{2,}$", "a+.@"),
        (r"^(?=.*[A-B])(?=.*\d).{3,}$", "aAB1"),
        (r"^(?=a|b)(?=..?$)[abc]*", "abc"),
        (r"^(?=(a|b(c))$)\w", "abc"),
        ("^(?!a)", "ab"),
        ("^(?!ab)(?!ba)[ab]*$", "ab"),
        ("^(?!aba)b?", "ab"),
        (r"^(?![ab]\d[^b])\w+$", "ab1"),
        (r"^(?![^a)]\D)", "a)1"),
        ("^(?!.*a)", "ab"),
        ("^(?!.*aaa)b", "ab"),
        ("^(?!-)(?!.*--)(?=.*[a-z]$)[a-z-]+", "a-"),
        ("^(?!.*[ab][ab])", "abc"),
        (r"^(?!\\)(?=.*[)\]])", "\\)]"),
    ],
)
def test_they_match_the_same(pattern, alphabet):
    found = without_look_aheads(pattern)
    assert not re.search(r"\(\?[=!]", "".join(found))
    verdicts = set()
    for text in texts(alphabet, 7):
        verdict = re.search(pattern, text) is not None
        assert all(re.search(one, text) for one in found) == verdict, text
        verdicts.add(verdict)
    assert verdicts == {True, False}


def test_no_line_may_hold_what_no_first_line_may():
    (pattern,) = without_look_aheads("^(?!.*--)")
    assert not re.search(pattern, "a\nb--c")
    assert re.search(pattern, "a-\n-c")


@pytest.mark.parametrize("pattern", ["^a|b$", "[(?=]", r"\(?=a", "(?:a)(b)", "", "[^"])
def test_others_stay(pattern):
    assert without_look_aheads(pattern) == [pattern]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)b", "right after a ^ at the beginning"),
        ("a(?!b)", "right after a ^ at the beginning"),
        ("^(?<=a)b", "that all alternatives share"),
        ("^a(?!b)", "that all alternatives share"),
        ("^(?=a)b|c", "that all alternatives share"),
        ("^(?=a)(b|c)|d", "that all alternatives share"),
        ("^(?=(?!a)b)", "there is another in it"),
        ("^(?=a)*b", "must not be repeated"),
        ("^(?=a){2}b", "must not be repeated"),
        ("^(?!a*)b", "1 to 32 single characters"),
        ("^(?!a|b)", "1 to 32 single characters"),
        ("^(?!)a", "1 to 32 single characters"),
        ("^(?!.)a", "1 to 32 single characters"),
        (r"^(?!\b)a", "1 to 32 single characters"),
        ("^(?![a&&b])", "1 to 32 single characters"),
        ("^(?!" + 33 * "a" + ")", "1 to 32 single characters"),
        ("^(?!.*ab)", "must be equal"),
        ("^(?=[])a])b", "class of characters"),
        ("^(?=a", "has no end"),
    ],
)
def test_others_are_refused(pattern, reason):
    with pytest.raises(
        ValueError, match=rf"^its pattern '.*' has a look-around .*{re.escape(reason)}"
    ):
        without_look_aheads(pattern)
