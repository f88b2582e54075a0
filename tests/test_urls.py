"""URLs: joined like paths, told apart from paths, asked again where that can help."""

from __future__ import annotations

import errno
from pathlib import Path
from unittest import mock

import attrs
import pytest
from botocore.exceptions import ClientError, NoCredentialsError, ParamValidationError
from s3fs.errors import translate_boto_error

import forgekit as fk
from forgekit.config import ConfigError, key, load_config, structure, to_dict
from forgekit.ranks import explain
from forgekit.remote import urls
from forgekit.remote.urls import UrlError, fs_of, path_or_url, retried


@attrs.frozen
class Config:
    out: fk.Location = key(Path("runs"), "Where.")  # noqa: RUF009
    old: Path = key(Path("data"), "A path alone.")  # noqa: RUF009


@pytest.mark.parametrize("url", ["s3://bucket/run", "file:///tmp/a"])
def test_a_key_of_a_recipe_takes_a_url(url):
    config = load_config(Config, [f"out={url}/"])
    assert (config.out, config.out / "checkpoints") == (url, f"{url}/checkpoints")
    assert to_dict(config) == {"out": url, "old": "data"}
    assert structure(Config, to_dict(config)) == config


NO_URL = {
    "out: the path is empty": {"out": ""},
    r"out: expected Path, read 5 \(int\)": {"out": 5},
    r"old: expected a path, read the URL s3://b/r; .* as forgekit\.Location": {"old": "s3://b/r"},
    "out: s3:// looks like a URL .* such as s3://bucket/folder": {"out": "s3://"},
}


@pytest.mark.parametrize("message", NO_URL)
def test_a_key_of_a_recipe_names_what_is_neither_a_path_nor_a_url(message):
    assert load_config(Config, ["out=runs/a"]).out == Path("runs/a")
    with pytest.raises(ConfigError, match=message):
        structure(Config, NO_URL[message])


def test_what_is_almost_a_url_names_no_folder_of_this_machine():
    message = r"s3:/b/r looks like a URL .* pass a string such as s3://bucket/folder"
    for use in (path_or_url, fk.token_dataset, fk.latest_checkpoint):
        for almost in ("s3:/b/r", Path("s3://b/r")):
            with pytest.raises(ValueError, match=message):
                use(almost)


def test_a_scheme_is_read_in_any_case_and_one_that_nothing_knows_is_named():
    fs, root = fs_of("Memory://Capital/Run")
    assert (fs.protocol, root) == ("memory", "/Capital/Run")
    with pytest.raises(ValueError, match="does not know the scheme 'nowhere' of nowhere://a"):
        fs_of("nowhere://a")


def answered(code, status, operation="PutObject"):
    """What s3fs raises for an answer of the store."""
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate_boto_error(ClientError(answer, operation))


PASSING = {
    "time-out": TimeoutError(),
    "unknown": RuntimeError("SlowDown: reduce your request rate"),
    "503": answered("SlowDown", 503),
    "throttled": answered("ThrottlingException", 400),
    "without a body": answered("400", 400, "HeadObject"),
    "torn": answered("IncompleteBody", 400),
    "disk": OSError(errno.EIO, "Input/output error"),
}


@pytest.fixture
def pauses(monkeypatch):
    """The pauses that would have been made."""
    made = []
    monkeypatch.setattr(urls.time, "sleep", made.append)
    monkeypatch.setattr(urls.time, "monotonic", lambda: sum(made))
    return made


@pytest.mark.parametrize("name", PASSING)
def test_what_may_pass_is_tried_again_after_growing_pauses(name, pauses):
    action, asked = mock.Mock(side_effect=[*[PASSING[name]] * 3, "done"]), []
    assert retried(action, "s3://b/x", before=lambda: asked.append(len(pauses))) == "done"
    assert asked == [0, 1, 2, 3]  # another writer may have come meanwhile
    for pause, middle in zip(pauses, (0.5, 1.0, 2.0), strict=True):
        assert 0.69 * middle < pause < 1.31 * middle


@pytest.mark.parametrize(("name", "slow"), [("disk", 0.0), ("503", 25.0)])
def test_there_is_a_limit_to_it(name, slow, pauses):
    def action():
        pauses.append(slow)  # a try takes time too
        raise PASSING[name]

    message = "s3://b/x: the store has failed for 60 s: "
    with pytest.raises(UrlError, match=message) as refusal:
        retried(action, "s3://b/x", patience_s=60)
    assert 20 < sum(pauses) <= 60 + slow
    assert explain(refusal.value) == str(refusal.value)


REFUSED = {
    "NoSuchBucket": answered("NoSuchBucket", 404),
    "ParamValidationError": ParamValidationError(report=""),
    "Unable to locate credentials": NoCredentialsError(),
    "PermissionError: no": PermissionError("no"),  # as other stores than S3 say it
    "PermissionError": answered("AccessDenied", 403),
    "PermanentRedirect": answered("PermanentRedirect", 301),
    "No space left on device": OSError(errno.ENOSPC, "No space left on device"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_pause_can_cure_is_refused_at_once(message, pauses):
    with pytest.raises(UrlError, match=f"^s3://b/x: .*{message}"):
        retried(mock.Mock(side_effect=REFUSED[message]), "s3://b/x")
    assert pauses == []


ANSWERS = (
    answered("NoSuchKey", 404),
    answered("PreconditionFailed", 412),
    OSError(errno.EINVAL, "Not a regular file"),
    ValueError("a manifest of another format"),
)


@pytest.mark.parametrize("error", ANSWERS)
def test_an_answer_is_no_failure(error, pauses):
    with pytest.raises(type(error)) as raised:
        retried(mock.Mock(side_effect=error), "s3://b/x")
    assert raised.value is error
    assert pauses == []
