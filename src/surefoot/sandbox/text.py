"""Turns bytes from untrusted code into text that is safe to print, store and tokenise."""

from __future__ import annotations

# C0 and C1 controls and DEL, except newline and tab.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def clean(data: bytes) -> str:
    r"""Decode as UTF-8 with ``\xNN`` for bytes that are not, and drop controls other than ``\n`` and ``\t``.

    The text can hold what looks like chat markup; that it stays text is the tokeniser's duty.
    """
    return data.decode("utf-8", "backslashreplace").translate(_CONTROLS)
