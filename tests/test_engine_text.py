"""Tokens to text: whole characters only, stop strings across tokens, nothing shown too early."""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
from helpers_engine import BytesTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vexpert.engine.detokenizer import WINDOW, Detokenizer, find_decode
from vexpert.engine.sampling_params import SamplingParams
from vexpert.engine.stop_strings import OutputText
from vexpert.server.places import Places

BYTES = BytesTokenizer([bytes([value]) for value in range(256)])


def stream(tokenizer: object, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    return [detokenizer.append(token) for token in tokens]


def cut(data: bytes, rng: random.Random) -> BytesTokenizer:
    pieces = []
    while data:
        size = rng.randrange(1, 6)
        pieces.append(data[:size])
        data = data[size:]
    return BytesTokenizer(pieces)


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=60), st.integers(0, 100))
def test_the_deltas_join_to_the_text(text: str, seed: int) -> None:
    text += "."  # this tokenizer does not tell a U+FFFD at the end from half a character
    tokenizer = cut(text.encode(), random.Random(seed))
    deltas = stream(tokenizer, list(range(len(tokenizer.pieces))))
    assert "".join(deltas) == text


@pytest.mark.parametrize("text", ["naïve", "日本語", "😀👩‍👩‍👧🇫🇷", "a😀", "𝔘𝔫𝔦"])
def test_a_character_comes_whole_with_its_last_byte(text: str) -> None:
    deltas = stream(BYTES, list(text.encode()))
    expected = [piece for letter in text for piece in [""] * (len(letter.encode()) - 1) + [letter]]
    assert deltas == expected


def test_tokens_of_a_character_begin_where_it_does() -> None:
    places = Places(Detokenizer(BYTES, skip_special_tokens=True), start=5)
    found = [place for byte in "a😀日b".encode() for place in places.append([byte])]
    assert found == [5, 6, 6, 6, 6, 7, 7, 7, 8]


def test_a_character_cut_off_by_the_end_is_dropped() -> None:
    assert "".join(stream(BYTES, list("ok 😀".encode()[:-1]))) == "ok "


def test_bytes_that_are_no_text_neither_stall_nor_crash() -> None:
    deltas = stream(BYTES, [0xFF] * 100 + list(b"end"))
    assert "".join(deltas).endswith("end")
    assert "".join(deltas).count("\ufffd") == 100
    assert "".join(deltas[:50]).count("\ufffd") == 47


def test_a_long_text_is_decoded_in_short_windows() -> None:
    calls = []

    class Counting(BytesTokenizer):
        def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
            calls.append(len(token_ids))
            return super().decode(token_ids)

    text = "héllo wörld 😀 " * 100
    assert "".join(stream(Counting(BYTES.pieces), list(text.encode()))) == text
    assert max(calls) <= 2 * WINDOW + 1
    assert len(calls) < 1.2 * len(text.encode())


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Spaces as U+2581, the first one stripped, and single bytes for what is not in the words."""
    words = ["<unk>", "▁the", "▁cat", "s", "▁", "!", *(f"<0x{value:02X}>" for value in range(256))]
    inner = Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def test_spaces_and_byte_fallback_of_a_real_tokenizer() -> None:
    tokenizer = sentencepiece_like()
    emoji = [6 + byte for byte in "😀".encode()]
    tokens = ([1, 2, 3] * 9 + emoji + [1, 5]) * 4
    deltas = stream(tokenizer, tokens)
    assert "".join(deltas) == tokenizer.decode(tokens)
    assert "".join(deltas).startswith("the cats the cats")
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_run_of_bytes_is_decoded_as_a_whole() -> None:
    tokenizer = sentencepiece_like()
    for text in ("😀😀", "日本語" * 9, "é😀日" * 20):
        tokens = [1, *(6 + byte for byte in text.encode()), 5]
        assert "".join(stream(tokenizer, tokens)) == f"the{text}!"


def byte_level() -> PreTrainedTokenizerFast:
    """Bytes under the names that byte-level tokenizers give them."""
    names = bytes_to_unicode()
    inner = Tokenizer(models.BPE({names[byte]: byte for byte in range(256)}, []))
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def with_plain_character() -> PreTrainedTokenizerFast:
    words = {"<unk>": 0, "a": 1, "\ufffd": 2}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


WRITTEN = list("\ufffd".encode())


@pytest.mark.parametrize(
    ("make", "first", "written"),
    [
        (byte_level, [ord("a")], WRITTEN),
        (sentencepiece_like, [5], [6 + byte for byte in WRITTEN]),
        (with_plain_character, [1], [2]),
    ],
)
def test_a_replacement_character_that_was_written_is_told_at_once(
    make: Callable[[], Any], first: list[int], written: list[int]
) -> None:
    tokenizer = make()
    for count in (1, 2, 5, 40):
        tokens = first + written * count
        deltas = stream(tokenizer, tokens)
        assert "".join(deltas) == tokenizer.decode(tokens)
        assert "".join(deltas).count("\ufffd") == count


@pytest.mark.parametrize(("make", "zero"), [(byte_level, 0), (sentencepiece_like, 6)])
def test_half_a_character_is_still_held(make: Callable[[], Any], zero: int) -> None:
    half = [zero + byte for byte in "😀".encode()[:3]]
    assert "".join(stream(make(), half)) == ""
    whole = [zero + byte for byte in (*WRITTEN, *"😀".encode())]
    assert "".join(stream(make(), whole)) == "\ufffd😀"
    assert "".join(stream(make(), whole[:-1])) == "\ufffd"


def feed(pieces: list[str], **options: object) -> tuple[list[str], str, str | None]:
    """What is visible after each piece, the final text, and the stop string found."""
    output = OutputText(SamplingParams(**options))
    shown = []
    for piece in pieces:
        stop = output.append(piece, look_for_stops=True)
        if stop is not None:
            return shown, output.text, stop
        shown.append(output.visible())
    return shown, output.text, None


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "found"),
    [
        (["ab", "cd"], ["bc"], "a", "bc"),
        (["a", "b", "c", "d"], ["bcd"], "a", "bcd"),
        (["hello END"], ["END"], "hello ", "END"),
        (["x", "yz"], ["q"], "xyz", None),
        (["abc"], ["c", "bc"], "a", "bc"),
        (["abcabc"], ["ca", "b"], "a", "b"),
        (["\n", "\n"], ["\n\n"], "", "\n\n"),
        (["aa", "ab"], ["aab"], "a", "aab"),
    ],
)
def test_stop_strings(pieces: list[str], stop: list[str], text: str, found: str | None) -> None:
    assert feed(pieces, stop=stop)[1:] == (text, found)


def test_a_kept_stop_string_ends_the_text() -> None:
    assert feed(["ab", "cd"], stop="bc", include_stop_str_in_output=True)[1:] == ("abc", "bc")


def test_the_beginning_of_a_stop_string_is_not_shown() -> None:
    shown, text, _ = feed(["a", "S", "T", "x", "ST", "S"], stop=["STOP", "ab"])
    assert shown == ["", "a", "a", "aSTx", "aSTx", "aSTxST"]
    assert text == "aSTxSTS"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=2, max_size=4), min_size=1, max_size=3),
)
def test_the_same_text_in_any_pieces_stops_alike(pieces: list[str], stops: list[str]) -> None:
    shown, text, found = feed(pieces, stop=stops)
    letters, letter_text, letter_found = feed(list("".join(pieces)), stop=stops)
    assert (text, found) == (letter_text, letter_found)
    for visible in shown + letters:
        assert text.startswith(visible)


def test_text_before_min_tokens_does_not_stop() -> None:
    output = OutputText(SamplingParams(stop="ab"))
    assert output.append("ab", look_for_stops=False) is None
    assert output.append("xab", look_for_stops=True) == "ab"
    assert output.text == "abx"


def word_tokenizer(**options: object) -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["<end>", "one", "two", ".", "it"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", **options)


@pytest.mark.parametrize("skip", [True, False])
def test_a_plain_tokenizer_is_decoded_without_its_wrapper(skip: bool) -> None:
    tokenizer = word_tokenizer(clean_up_tokenization_spaces=False)
    decode = find_decode(tokenizer, skip)
    assert isinstance(decode, functools.partial)
    assert decode.func == tokenizer.backend_tokenizer.decode
    ids = [1, 2, 0, 4, 3]
    assert decode(ids) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert ("<end>" in decode(ids)) is not skip


def test_a_tokenizer_that_changes_what_it_decodes_keeps_its_wrapper() -> None:
    class Loud(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **options: Any) -> str:
            return super()._decode(*args, **options).upper()

    cleans = word_tokenizer(clean_up_tokenization_spaces=True)
    loud = Loud(tokenizer_object=cleans.backend_tokenizer, eos_token="<end>")
    for tokenizer in (cleans, loud, BYTES):
        decode = find_decode(tokenizer, True)
        assert isinstance(decode, functools.partial)
        assert decode.func == tokenizer.decode
    assert find_decode(loud, True)([1, 2]) == loud.decode([1, 2]) == "ONE TWO"
