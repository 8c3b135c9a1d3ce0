"""Text that models, environments and child processes wrote, made safe to print on a terminal.

A completion may hold escape sequences that move the cursor, set the title or hide what follows; bidirectional
controls that reorder a line; carriage returns that overwrite it. All of them become visible escapes.
"""

from __future__ import annotations

import unicodedata

_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # controls, formats, surrogates, unassigned, separators
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\x1b": "\\e"}


def printable(text: str, limit: int = 2000) -> str:
    """One line without any control: each becomes an escape that shows what it was.

    Args:
        text: anything.
        limit: characters kept; what is cut off is counted at the end.
    """
    kept = text[:limit]
    line = kept if kept.isascii() and kept.isprintable() else "".join(_visible(sign) for sign in kept)
    return line if len(text) <= limit else f"{line}... ({len(text) - limit} more characters)"


def _visible(sign: str) -> str:
    if unicodedata.category(sign) not in _UNSEEN:
        return sign
    if sign in _SHORT:
        return _SHORT[sign]
    code = ord(sign)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
