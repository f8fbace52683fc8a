"""The tokenizer of the fake model: a token is a byte of UTF-8, and there are three special ones."""

import codecs
import re
from collections.abc import Mapping, Sequence

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
FIRST_SPECIAL = 256
END_OF_TURN = FIRST_SPECIAL + SPECIALS.index("<|im_end|>")
SPLIT = re.compile("(" + "|".join(re.escape(special) for special in SPECIALS) + ")")


class FakeDetokenizer:
    """Bytes to text; the first bytes of a character are held back until it is whole."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._segment = ""

    def add_token(self, token: int) -> None:
        if token < FIRST_SPECIAL:
            self._segment += self._decoder.decode(bytes((token,)))

    def finalize(self) -> None:
        self._segment += self._decoder.decode(b"", final=True)

    @property
    def last_segment(self) -> str:
        segment, self._segment = self._segment, ""
        return segment


class FakeTokenizer:
    """See scheduler/engine/model.py, `Tokenizer`."""

    vocab_size = FIRST_SPECIAL + len(SPECIALS)
    end_of_turn_ids: Sequence[int] = (END_OF_TURN,)

    @property
    def detokenizer(self) -> FakeDetokenizer:
        return FakeDetokenizer()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in SPLIT.split(text):
            if part in SPECIALS:
                ids.append(FIRST_SPECIAL + SPECIALS.index(part))
            else:
                ids.extend(part.encode("utf-8"))
        return ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **options: object,
    ) -> str:
        """ChatML, as SmolLM2 has it, which reads no options. Tools are listed in front."""
        del options
        head = f"<|im_start|>tools\n{list(tools)}<|im_end|>\n" if tools else ""
        turns = (
            f"<|im_start|>{message['role']}\n{message.get('content') or ''}<|im_end|>\n"
            for message in messages
        )
        tail = "<|im_start|>assistant\n" if add_generation_prompt else ""
        return head + "".join(turns) + tail
