"""The doctor: what a folder and ranks can do, and what it says where they cannot."""

import errno
import fcntl
import io
import os
import re
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
from pool import run_ranks
from runs import free_port, rank_variables

from forgekit.cli import main
from forgekit.doctor import check_folder


def test_a_good_folder_is_ready_and_nothing_is_left_behind(tmp_path, capsys):
    out = tmp_path / "runs" / "a"
    assert main(["doctor", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.endswith("\nready\n")
    for name in ("rename", "lock"):
        assert re.search(rf"^  ok    {name} ", said, re.M), name
    assert [*tmp_path.iterdir()] == []


def launched(rank, world, port, out):
    """``forgekit doctor`` as torchrun starts it on one rank; what it printed and its exit code."""
    started = rank_variables(rank, world, port)
    said, folder = io.StringIO(), Path(out, str(min(rank, 1)))
    folder.mkdir(exist_ok=True)
    with mock.patch.dict(os.environ, started), redirect_stdout(said):
        code = main(["doctor", str(folder)])
    return code, said.getvalue()


def test_under_a_launcher_its_ranks_are_checked_and_the_first_says_which_share_no_folder(tmp_path):
    (code, said), *others = run_ranks(launched, 3, free_port(), str(tmp_path), group=False)
    assert "\n3 ranks\n  ok    sum on cpu         3 ranks added ones up to 3\n" in said
    bad = r"\n  BAD   shared folder      ranks 1, 2 do not see a file that rank 0 writes into .*\n"
    assert re.search(bad + r"\n1 problem to fix before a run\n$", said), said
    assert (code, others) == (1, [(0, "")] * 2)


def refuse(*arguments, **options):
    raise OSError(errno.EPERM, "Operation not permitted")


CANNOT = {
    "lock": (fcntl, "flock", "note", "Make sure that no second run writes"),
    "rename": (Path, "rename", "BAD", "Make room, if it is full. Checkpoints need it: "),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_a_file_system_cannot_do_says_what_that_means(name, tmp_path, monkeypatch):
    *part, outcome, remedy = CANNOT[name]
    monkeypatch.setattr(*part, refuse)
    checks = {check.name: check for check in check_folder(tmp_path)}
    assert checks[name].outcome == outcome
    assert remedy in checks[name].text
    assert [n for n, check in checks.items() if check.outcome != "ok"] == [name]
    assert [*tmp_path.iterdir()] == []


def test_a_lock_that_two_get_is_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: None)
    (check,) = (check for check in check_folder(tmp_path) if check.name == "lock")
    assert (check.outcome, check.text[:26]) == ("note", "a file was locked twice. M")


@pytest.mark.parametrize(("below", "is_link"), [(".", False), ("a/b", False), (".", True)])
def test_what_is_no_folder_cannot_be_a_run_directory(tmp_path, below, is_link):
    file = tmp_path / "file"
    file.symlink_to(tmp_path / "gone") if is_link else file.write_text("notes")
    (check,) = check_folder(file / below)
    assert check.outcome == "BAD"
    assert f": {file}. Make it a folder that can be written, or choose another out=." in check.text


def test_a_folder_where_nothing_can_be_written_ends_with_1(capsys):
    assert main(["doctor", "/proc/run"]) == 1
    said = capsys.readouterr().out
    assert "BAD   writable           No such file or directory: /proc. Make it a folder" in said
    assert said.endswith("\n1 problem to fix before a run\n")
