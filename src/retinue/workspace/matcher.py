"""Finding the lines that match a regular expression; run as a program, it does so for another process.

A regular expression can take for ever. It keeps the interpreter lock while it does and no thread can stop it, so
`grep_files` lets it run where it can be killed. The program reads and writes a JSON line for each message: the
pattern, answered by what is wrong with it if anything, then blocks of text, each answered by its matches.
"""

import json
import re
import sys

SHOWN_CHARS = 300
"""What is shown of a line."""


def find_lines(pattern: "re.Pattern[str]", block: bytes, first: int, most: int) -> "list[tuple[int, str]]":
    """The numbers and texts of matching lines; `first` is the number of the first line of the block."""
    found: list[tuple[int, str]] = []
    for number, line in enumerate(block.decode("utf-8", "replace").split("\n"), first):
        if match := pattern.search(line):
            found.append((number, excerpt(line, match.start())))
            if len(found) >= most:
                break
    return found


def excerpt(line: str, position: int) -> str:
    """A line as it is, or the part of a long one around the match."""
    if len(line) <= SHOWN_CHARS:
        return line
    start = max(0, min(position - SHOWN_CHARS // 3, len(line) - SHOWN_CHARS))
    end = start + SHOWN_CHARS
    return "…" * (start > 0) + line[start:end] + "…" * (end < len(line))


def compile_pattern(pattern: str) -> "re.Pattern[str] | str":
    """The compiled pattern, or what is wrong with it and where."""
    try:
        return re.compile(pattern)
    except re.error as error:
        if error.pos is None or "\n" in pattern:
            return error.msg
        return f"{error.msg} at position {error.pos}\n{pattern}\n{' ' * error.pos}^"
    except (RecursionError, OverflowError) as error:
        return f"it is too large: {error}"


def main() -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer

    def answer(message: object) -> None:
        answers.write(json.dumps(message).encode() + b"\n")
        answers.flush()

    pattern = compile_pattern(json.loads(requests.readline()))
    if isinstance(pattern, str):
        return answer(pattern)
    answer(None)
    while header := requests.readline():
        size, first, most = json.loads(header)
        answer(find_lines(pattern, requests.read(size), first, most))


if __name__ == "__main__":
    main()
