"""The control tokens of a Hugging Face folder, which may stand in four files.

tokenizer.json has them all if transformers wrote it. Older folders, and those changed by hand, name
some in tokenizer_config.json, special_tokens_map.json or added_tokens.json alone. transformers then
adds them to the vocabulary, in an order that decides their ids; the same is done here.
"""

from pathlib import Path
from typing import Any

from minillm.tools.checks import brief
from minillm.weights.files import read_json

_ROLES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
"""In the order in which transformers adds those that are no tokens yet."""

_CONFIG, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"


class SpecialTokens:
    """ids: text -> id of every control token. named: "bos_token" -> its text, for chat templates.

    Raises ValueError for a token whose id two files disagree about, for options that would change
    the ids, and for an eos_token that no file lists as a token.
    """

    def __init__(self, folder: Path, raw: dict[str, Any], settings: dict[str, Any]):
        added = raw.get("added_tokens", [])
        self._vocab = raw["model"]["vocab"]
        self.ids: dict[str, int] = {token["content"]: token["id"] for token in added}
        _refuse_options(added)
        # transformers reads two of the files only if tokenizer_config.json has no list of its own.
        listed, others = settings.get("added_tokens_decoder"), {}
        if listed is None:
            others = read_json(folder / _MAP, missing_ok=True)
            for text, i in _by_id(read_json(folder / _ADDED, missing_ok=True), _ADDED):
                self._add(text, i, _ADDED)
        else:
            _refuse_options(list(listed.values()))
            pairs = {token["content"]: _whole(i) for i, token in listed.items()}
            for text, i in _by_id(pairs, _CONFIG):
                self._add(text, i, f"{_CONFIG} (added_tokens_decoder)")
        # Then those that have a role, and no id of their own
        named, extra = _named(settings, others)
        self.named = {role: _text(role, token) for role, token in named.items()}
        more = [_text("A special token", token) for token in extra]
        self._check_eos(more)
        _refuse_options([t for t in (*named.values(), *extra) if _text("", t) not in self.ids])
        for text in (*self.named.values(), *more):
            self._add(text, None, _CONFIG)

    def _add(self, text: str, i: int | None, file: str) -> None:
        """Make a token of `text`, unless it is one, with the id that transformers would give it."""
        if not text or text in self.ids:
            return
        following = max(len(self._vocab), 1 + max(self.ids.values(), default=-1))
        at = self._vocab.get(text, following)
        if i is not None and i != at:
            raise ValueError(
                f"{file} gives the token {brief(text)} the id {brief(i)}, and by tokenizer.json it "
                f"is {brief(at)}; put the token into tokenizer.json's added_tokens."
            )
        self.ids[text] = at

    def _check_eos(self, more: list[str]) -> None:
        eos = self.named.get("eos_token")
        known = (*self.ids, *more)
        if eos and eos not in known and eos not in self._vocab:
            raise ValueError(
                f"The folder's eos_token {brief(eos)} is no token of its vocabulary, so no answer "
                "would end; correct it in tokenizer_config.json or special_tokens_map.json, or add "
                "it to tokenizer.json's added_tokens."
            )


def _named(settings: dict[str, Any], others: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The tokens with a role, as the files have them, and a list of those without one."""
    both = settings | others
    custom = [key for key in both if key.endswith("_token") and key not in _ROLES]
    # A switch like add_bos_token has such a name, too.
    custom = [key for key in custom if isinstance(both[key], str) or _is_token(both[key])]
    named = {role: both[role] for role in (*_ROLES, *custom) if both.get(role) is not None}
    extra: list[Any] = []
    for part in (settings, others):
        old = None if extra else part.get("additional_special_tokens")
        more = part.get("extra_special_tokens") or old or []
        if isinstance(more, dict):
            named |= more
        elif isinstance(more, list):
            extra += more
        else:
            raise ValueError(f"extra_special_tokens is {brief(more)}; it must be a list or object.")
    return named, extra


def _is_token(value: Any) -> bool:
    return isinstance(value, dict) and "content" in value


def _text(role: str, token: Any) -> str:
    """A token's text, from a string or from {"content": …}."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"{role} is {brief(token)}; it must be a string, or hold one as content.")
    return text


def _whole(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        raise ValueError(f"{_CONFIG} has {brief(key)} for an id; it must be a whole number.")
    return int(key)


def _by_id(tokens: dict[str, int], file: str) -> list[tuple[str, int]]:
    bad = next((i for i in tokens.values() if type(i) is not int), None)
    if bad is not None:
        raise ValueError(f"{file} has {brief(bad)} for an id; it must be a whole number.")
    return sorted(tokens.items(), key=lambda pair: pair[1])


def _refuse_options(tokens: list[Any]) -> None:
    """Raise ValueError for what changes how a control token is found in a text."""
    for token in tokens:
        for option in ("lstrip", "rstrip", "single_word"):
            if isinstance(token, dict) and token.get(option):
                raise ValueError(
                    f"The option {option} of the added token {brief(token['content'])} is not "
                    "implemented."
                )
