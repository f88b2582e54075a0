"""Workers that are processes: what they compute is what one process computes, or it is an error."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from runs import launch
from tensordict import TensorDict
from texts import content_of, small_steps, write_lines

from forgekit.data import prepare, text_documents
from forgekit.data.loader import make_loader


class Rows(list):
    """Row ``i`` is made of its number; one is broken, and one kills its process."""

    def __getitem__(self, row):
        number = list.__getitem__(self, row)
        if number == "broken":
            raise KeyError("row is bad", row)
        if number == "dies":
            os._exit(1)
        return TensorDict({"input_ids": torch.full((3,), number)})


def test_loaders_give_the_same_batches_and_exceptions_and_a_death_is_no_hang():
    options = {"batch_size": 2, "epochs": 1}
    expected = list(make_loader(Rows(range(8)), **options))
    with make_loader(Rows(range(8)), **options, workers=1, processes=True) as loader:
        for batch, reference in zip(loader, expected, strict=True):
            assert (batch == reference).all()
    for row, error, message in (
        ("broken", KeyError, "row is bad.*0"),
        ("dies", RuntimeError, "terminated abruptly"),
    ):
        with (
            make_loader(Rows([row]), 1, workers=1, processes=True) as loader,
            pytest.raises(error, match=message),
        ):
            next(iter(loader))


READER = """
from forgekit.data.loader import make_loader
from forgekit.run.stop_signal import StopSignal
from tensordict import TensorDict
import time, torch

class Rows(list):
    def __getitem__(self, row):
        return TensorDict({"x": torch.tensor([row])})

if __name__ == "__main__":
    options = {"workers": 1, "processes": True, "epochs": None}
    with make_loader(Rows(range(9)), 1, **options) as loader, StopSignal() as stop:
        batches = iter(loader)
        print("reads", next(batches)["x"].numel(), flush=True)
        while stop.reason is None:
            time.sleep(0.01)
        for _ in range(50):
            next(batches)
        print(stop.reason, flush=True)
        time.sleep(600)
"""


def test_workers_go_on_after_ctrl_c_and_end_with_a_process_that_was_killed(tmp_path):
    (tmp_path / "reader.py").write_text(READER)
    with launch(tmp_path / "reader.py", [], log=tmp_path / "log", by="command") as job:
        job.wait_for(lambda: "reads 1" in job.output, "a batch")
        assert len(job.members()) > 1
        for process in job.members():
            os.kill(process, signal.SIGINT)
        job.wait_for(lambda: "SIGINT" in job.output, "the request to stop")
        job.process.kill()
        assert job.end() == -signal.SIGKILL


def test_parts_are_written_as_by_one_process_whatever_their_size(tmp_path, monkeypatch):
    small_steps(monkeypatch)
    kept = write_lines(tmp_path / "a.jsonl", count=200)
    documents = text_documents(tmp_path / "a.jsonl", errors="skip")
    contents, files = {}, {}
    for name, workers in {"alone": 0, "processes": 2, "one part": 0}.items():
        if name == "one part":
            small_steps(monkeypatch, part=10**6)
        made = prepare(documents, tmp_path / name, vocab_size=300, workers=workers)
        contents[name] = content_of(made.path)
        files[name] = made.train.fingerprint, made.held_out.fingerprint, made.broken
        assert made.train.documents + made.held_out.documents == len(kept)
    assert contents["alone"] == contents["processes"]
    assert files["alone"] == files["one part"]
    with pytest.raises(ValueError, match=r"a.jsonl:98 cannot be read"):  # read in another thread
        prepare(tmp_path / "a.jsonl", tmp_path / "processes", vocab_size=301, workers=1)
