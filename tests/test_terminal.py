"""What is written for people: no control characters, and no exception when nobody reads it."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import unicodedata

import pytest

from forgekit.terminal import Steady, printable, steady_streams, tell, tell_once


def test_exactly_what_a_terminal_obeys_is_escaped():
    for code in range(0x3000):
        character = chr(code)
        is_control = unicodedata.category(character) == "Cc" and character not in "\n\t"
        moves = unicodedata.bidirectional(character) in {"LRE", "RLE", "LRO", "RLO", "PDF"}
        if is_control or moves:
            assert re.match(r"\\[ -~]+$", printable(character)), hex(code)
        elif unicodedata.category(character)[0] in "LNPS":
            assert printable(character) == character, hex(code)
    assert printable("\udcff") == r"\udcff", "a byte of a file name that is not UTF-8"


@pytest.mark.parametrize("name", ["/dev/full", "a pipe without a reader"])
def test_a_stream_that_fails_is_quiet_from_then_on(name):
    if name == "/dev/full":
        descriptor, number = os.open(name, os.O_WRONLY), errno.ENOSPC
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
        number = errno.EPIPE
    with open(descriptor, "w", buffering=1) as stream:
        steady = Steady(stream)
        assert [steady.write("one\n"), steady.write("more\n")] == [4, 5]
        steady.flush()
        assert steady.lost is not None
        assert steady.lost.errno == number
        stream.write("also by those who hold the stream itself\n")
    assert steady.closed


def test_streams_are_put_back_and_missing_ones_lead_nowhere(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdout", shown := io.StringIO())
    with steady_streams():
        print("seen")  # noqa: T201
        print("unseen", file=sys.stderr)  # noqa: T201
        assert not sys.stderr.isatty()
    assert (sys.stdout, sys.stderr) == (shown, None)
    tell("unseen")
    assert shown.getvalue() == "seen\n"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("local", "said"), [("0", "once\n"), ("1", ""), ("x", "once\n")])
def test_what_all_ranks_would_say_one_says(local, said, monkeypatch, capsys):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", local)):
        monkeypatch.setenv(name, value)
    tell_once("once")
    assert capsys.readouterr().err == said
