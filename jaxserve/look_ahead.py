"""Look-aheads of regular expressions, which llguidance has not, in expressions that have none."""

import re
from collections.abc import Sequence

MAX_RUN = 32
"""Characters in a negative look-ahead."""

_CODE = r"u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}"
_CLASS = r"\[\^?(?:\\.|[^\]\[\\])+\]"
_PIECE = re.compile(rf"\\(?:{_CODE}|.)|{_CLASS}|\(\?(?:<?[=!]|:)|.", re.DOTALL)
"""An escape, a class of characters, the beginning of a group, or a character."""
_ONE_CHARACTER = re.compile(
    rf"\\(?:{_CODE}|[dDsSwWnrtfv]|[^a-zA-Z0-9])|{_CLASS}|[^\\^$.|?*+()\[\]{{}}]", re.DOTALL
)
_LOOKS = ("(?=", "(?!", "(?<=", "(?<!")


def has_look_around(pattern: str) -> bool:
    return any(piece in _LOOKS for piece in _PIECE.findall(pattern))


def without_look_aheads(pattern: str) -> list[str]:
    """Expressions without look-aheads all of which a text must match, to match `pattern`.

    Each is searched for, as `pattern` is in JSON Schema. What begins with `^` may have any number
    of `(?=...)` next, and of `(?!...)` and `(?!.*...)` with a run of single characters in it, after
    `.*` of equal ones; `.*` then reaches over line ends too. ValueError for other look-arounds.
    """
    if not has_look_around(pattern):
        return [pattern]
    try:
        return _split(_PIECE.findall(pattern))
    except ValueError as error:
        raise ValueError(
            f"its pattern {pattern!r:.80} has a look-around that is not supported: {error}"
        ) from error


def _split(pieces: Sequence[str]) -> list[str]:
    if "[" in pieces:
        raise ValueError("a class of characters in it is empty, nested or has no end")
    if pieces[0] != "^":
        raise ValueError("it must come right after a ^ at the beginning")
    found = []
    begin = 1
    while begin < len(pieces) and pieces[begin] in ("(?=", "(?!"):
        end = _end_of_group(pieces, begin)
        inner = pieces[begin + 1 : end]
        if pieces[begin] == "(?!":
            found.append(_complement(inner))
        elif any(piece in _LOOKS for piece in inner):
            raise ValueError("there is another in it")
        else:
            found.append(f"^(?:{''.join(inner)})")
        begin = end + 1
    rest = pieces[begin:]
    if any(piece in _LOOKS for piece in rest) or _has_alternatives(rest):
        raise ValueError("it must come right after a ^ that all alternatives share")
    if rest and rest[0] in "*+?{":
        raise ValueError("it must not be repeated")
    return [*found, "^" + "".join(rest)] if rest else found


def _end_of_group(pieces: Sequence[str], begin: int) -> int:
    depth = 0
    for index in range(begin, len(pieces)):
        depth += pieces[index].startswith("(") - (pieces[index] == ")")
        if depth == 0:
            return index
    raise ValueError("it has no end")


def _has_alternatives(pieces: Sequence[str]) -> bool:
    depth = 0
    for piece in pieces:
        depth += piece.startswith("(") - (piece == ")")
        if depth == 0 and piece == "|":
            return True
    return False


def _complement(inner: Sequence[str]) -> str:
    """What matches the texts that do not begin with `inner`."""
    is_anywhere = list(inner[:2]) == [".", "*"]
    run = inner[2:] if is_anywhere else inner
    if not 0 < len(run) <= MAX_RUN or not all(map(_is_one_character, run)):
        raise ValueError(f"(?!...) must hold 1 to {MAX_RUN} single characters, or .* and these")
    if is_anywhere:
        if len(set(run)) > 1:
            raise ValueError("the characters after .* in (?!...) must be equal")
        fewer = f"{run[0]}{{0,{len(run) - 1}}}"
        return f"^(?:{fewer}{_other(run[0])})*{fewer}$"
    others = ""
    for one in reversed(run):
        others = f"(?:{_other(one)}[\\s\\S]*{others and '|' + one + others})?"
    return f"^{others}$"


def _is_one_character(piece: str) -> bool:
    # Doubled, some characters are operators in a class of Rust's, and mere characters elsewhere.
    return bool(_ONE_CHARACTER.fullmatch(piece)) and not re.search("&&|--|~~", piece)


def _other(one: str) -> str:
    """The characters that `one` does not match."""
    if one.startswith("[^"):
        return f"[{one[2:]}"
    return f"[^{one[1:]}" if one.startswith("[") else f"[^{one}]"
