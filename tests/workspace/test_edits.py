from __future__ import annotations

from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue.workspace.text import read_lines, read_window, replace_text

from ..effort import share

texts = st.text(st.sampled_from(list("ab \n\té")), max_size=30)


@settings(max_examples=share(500), deadline=None)
@given(texts, texts.filter(bool), texts)
def test_an_edit_is_a_replacement(content: str, old: str, new: str) -> None:
    edit = replace_text(content.encode(), old.encode(), new.encode())
    assert edit.data == content.replace(old, new).encode()
    assert len(edit.lines) == min(edit.occurrences, 20)
    assert edit.occurrences == content.count(old)


@settings(max_examples=share(500), deadline=None)
@given(texts.filter(lambda text: "\n" in text), texts.filter(bool), texts)
def test_line_ends_of_the_file_are_kept(content: str, old: str, new: str) -> None:
    def dos(text: str) -> bytes:
        return text.replace("\n", "\r\n").encode()

    for old_data in (old.encode(), dos(old)):
        for new_data in (new.encode(), dos(new)):
            edit = replace_text(dos(content), old_data, new_data)
            assert edit.data == dos(content.replace(old, new))


def test_mixed_line_ends_match_and_the_rest_stays() -> None:
    edit = replace_text(b"a\nb\r\nc\nd\r\n", b"b\nc\n", b"x\ny\n")
    assert edit.data == b"a\nx\ny\nd\r\n"
    assert edit.lines == [2]


@settings(max_examples=share(300), deadline=None)
@given(st.binary(max_size=40), st.binary(max_size=40))
def test_bytes_that_are_not_text_stay(before: bytes, after: bytes) -> None:
    data = before + b"<old>" + after
    assert replace_text(data, b"<old>", b"<new>").data == data.replace(b"<old>", b"<new>")


@settings(max_examples=share(500), deadline=None)
@given(st.binary(max_size=60).map(lambda data: data.replace(b"\x01", b"\n")), st.integers(1, 8))
def test_lines_are_whole_or_cut_with_what_is_missing(data: bytes, width: int) -> None:
    content = data.removeprefix(b"\xef\xbb\xbf")
    wanted = content.split(b"\n") if content else []
    if wanted and wanted[-1] == b"":
        wanted.pop()
    lines = list(read_lines(BytesIO(data), width=width))
    assert len(lines) == len(wanted)
    for line, whole in zip(lines, wanted, strict=True):
        assert whole.startswith(line.data)
        if line.cut:
            assert len(line.data) + line.cut + whole[:width].endswith(b"\r") >= len(whole)
        else:
            assert line.data == whole.removesuffix(b"\r")


@pytest.mark.parametrize("offset", range(5))
@pytest.mark.parametrize("limit", range(1, 5))
@pytest.mark.parametrize("data", [b"", b"1", b"1\n", b"1\n2", b"1\n2\n3\n"])
def test_windows_add_up(data: bytes, offset: int, limit: int) -> None:
    window = read_window(BytesIO(data), offset, limit)
    lines = data.decode().split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    assert [line.split("\t")[1] for line in window.lines] == lines[offset : offset + limit]
    assert window.total == len(lines)
    assert window.next == min(len(lines), offset + limit)
    assert window.counted
    assert not window.lossy
