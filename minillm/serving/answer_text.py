"""From an answer's tokens to its text: whole characters only, and nothing of a stop string.

Cost: a search for each stop string in the text that is held back, for each token.
"""

from collections.abc import Sequence

from minillm.tokenizer import Tokenizer


class AnswerText:
    """The text of one answer, without its stop string. Token by token.

    Text that may be the beginning of a stop string is held back until it is known whether it is:
    a stop string can lie across several tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._decoder, self._stop = tokenizer.stream(), stop
        self._held = ""
        self.stopped = False  # a stop string was said

    def push(self, token: int) -> str:
        """The text that is certain with this token."""
        return self._certain(self._decoder.push(token))

    def flush(self) -> str:
        """What is left at the end of the answer."""
        text = self._certain(self._decoder.flush())
        text, self._held = text + self._held, ""
        return text

    def _certain(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        n_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        certain = text[: len(text) - n_held]
        self._held = text[len(certain) :]
        return certain


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
