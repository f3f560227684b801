"""Answers in OpenAI's form: one JSON object, or a stream of chunks.

Source: OpenAI's API reference. In a stream the role comes with the first token, since clients take
the first chunk as the time to first token, and the usage in a chunk of its own without choices.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from minillm.sampling import TokenLogprobs
from minillm.serving.engine_thread import Piece
from minillm.serving.protocol import Ask
from minillm.tokenizer import Tokenizer

_LEAST = -9999.0  # in place of -∞, which JSON has not


class Reply:
    """Turns the pieces of one request into JSON.

    prompts: of the ask, as token ids. scores: the log-probabilities of each prompt's tokens but the
    first, where `echo` and `logprobs` ask for them.
    """

    def __init__(
        self,
        ask: Ask,
        model: str,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        scores: Sequence[Sequence[TokenLogprobs]],
    ):
        self._ask, self._tokenizer, self._prompts, self._scores = ask, tokenizer, prompts, scores
        kind = "chat.completion" if ask.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if ask.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if ask.chat and ask.stream else kind,
            "created": int(time.time()),
            "model": model,
        }
        n = len(prompts) * ask.n
        self.n_tokens = [0] * n  # of each answer, so far
        self._begun = [False] * n
        self._offsets = [0] * n  # characters of each answer's tokens, so far
        self.n_open = n  # answers that go on

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of all prompts and of all answers so far."""
        n_prompt, n_new = sum(map(len, self._prompts)), sum(self.n_tokens)
        return {
            "prompt_tokens": n_prompt, "completion_tokens": n_new,
            "total_tokens": n_prompt + n_new,
        }  # fmt: skip

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The one object of an answer that is not streamed, from all its pieces."""
        choices = []
        for i in range(len(self.n_tokens)):
            own = [piece for piece in pieces if piece.answer == i]
            text, rows = self._echoed(i)
            text += "".join(piece.text for piece in own)
            rows += [piece.logprobs for piece in own if piece.token is not None]
            self.n_tokens[i] = sum(piece.token is not None for piece in own)
            said = {"message": {"role": "assistant", "content": text}}
            choices.append(
                {"index": i}
                | (said if self._ask.chat else {"text": text})
                | {"logprobs": self._logprobs(i, rows), "finish_reason": own[-1].finish_reason}
            )
        return self._head | {"choices": choices, "usage": self.usage}

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The chunks of a stream that a piece leads to."""
        i = piece.answer
        text, rows = ("", []) if self._begun[i] else self._echoed(i)
        if piece.token is not None:
            self.n_tokens[i] += 1
            rows.append(piece.logprobs)
        text += piece.text
        delta: dict[str, str] = {"content": text} if text or piece.token is not None else {}
        if not self._begun[i]:
            delta = {"role": "assistant", "content": text}
        self._begun[i] = True
        said = {"delta": delta} if self._ask.chat else {"text": text}
        self.n_open -= piece.finish_reason is not None
        yield self._chunk(
            {"index": i}
            | said
            | {"logprobs": self._logprobs(i, rows), "finish_reason": piece.finish_reason}
        )
        if not self.n_open and self._ask.include_usage:
            yield self._head | {"choices": [], "usage": self.usage}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._head | {"choices": [choice]}
        if self._ask.continuous_usage:
            return chunk | {"usage": self.usage}
        return chunk | {"usage": None} if self._ask.include_usage else chunk

    def _echoed(self, i: int) -> tuple[str, list[TokenLogprobs | None]]:
        """The prompt's text and its tokens' log-probabilities, if they are to be repeated."""
        if not self._ask.echo:
            return "", []
        at = i // self._ask.n
        prompt, asked = self._prompts[at], self._ask.prompts[at]
        text = asked if isinstance(asked, str) else self._tokenizer.decode(prompt)
        if self._ask.top_logprobs is None:
            return text, []
        # Nothing stands before the first token, so it has no log-probability.
        return text, [TokenLogprobs(prompt[0], 0.0, ()), *self._scores[at]]

    def _logprobs(self, i: int, rows: Sequence[TokenLogprobs | None]) -> dict[str, Any] | None:
        known = [row for row in rows if row is not None]
        if self._ask.top_logprobs is None or not known:
            return None
        if self._ask.chat:
            entries = [
                self._entry(row.token, row.logprob)
                | {"top_logprobs": [self._entry(*pair) for pair in row.top]}
                for row in known
            ]
            return {"content": entries}
        return self._legacy(i, known)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        utf8 = self._tokenizer.token_bytes(token)
        text = utf8.decode("utf-8", errors="replace")
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(utf8)}

    def _legacy(self, i: int, rows: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The four lists of /v1/completions."""
        texts = [self._tokenizer.decode([row.token]) for row in rows]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[i])
            self._offsets[i] += len(text)
        values: list[float | None] = [max(row.logprob, _LEAST) for row in rows]
        tops: list[dict[str, float] | None] = [
            {self._tokenizer.decode([token]): max(value, _LEAST) for token, value in row.top}
            for row in rows
        ]
        if self._ask.echo and offsets[0] == 0:  # the prompt's first token
            values[0] = tops[0] = None
        return {
            "tokens": texts, "token_logprobs": values, "top_logprobs": tops,
            "text_offset": offsets,
        }  # fmt: skip
