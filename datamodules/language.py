"""A guess at the language of a text from the scripts of its letters: cheap, and wrong where languages share a script."""

from __future__ import annotations

import unicodedata
from collections import Counter

_SCRIPTS = {
    "HIRAGANA": "Japanese",
    "KATAKANA": "Japanese",
    "HANGUL": "Korean",
    "CJK": "Chinese",
    "LATIN": "Latin script",
    "CYRILLIC": "Cyrillic script",
    "ARABIC": "Arabic script",
    "DEVANAGARI": "Devanagari script",
    "GREEK": "Greek",
    "HEBREW": "Hebrew",
    "THAI": "Thai",
}
_OTHER = "other"
_READ = 4000
_KANA_SHARE = 0.1


def guess_language(text: str) -> str:
    """The script that most letters belong to, named after the language where it has only one.

    Han characters count as Japanese if at least a tenth as many kana stand among them. Only the first 4,000
    characters are read. A text without letters is `other`.
    """
    counts: Counter[str] = Counter()
    for character in text[:_READ]:
        if character.isalpha():
            word = unicodedata.name(character, "").partition(" ")[0]
            counts[_SCRIPTS.get(word, _OTHER)] += 1
    if not counts:
        return _OTHER
    if counts["Japanese"] >= _KANA_SHARE * max(1, counts["Chinese"]):
        counts["Japanese"] += counts.pop("Chinese", 0)
    return counts.most_common(1)[0][0]
