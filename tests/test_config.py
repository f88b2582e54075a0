"""Configurations: what is merged, what is refused and in which words, what --help says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

from forgekit.config import ConfigError, key, load_config, structure, to_dict


@attrs.frozen(kw_only=True)
class Model:
    """Sizes.

    Attributes:
        dim: Width of the residual stream. Heads divide it.
        heads: Query heads.
        max_seq_len: Longest sequence.
    """

    dim: int
    heads: int = 4
    max_seq_len: int = 128

    def __attrs_post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not divisible by heads {self.heads}")


@attrs.frozen
class Optim:
    """How weights move.

    Args:
        lr: Peak learning rate, reached after
            ``warmup`` steps. Then it falls.
        decay: Pull towards zero.

    Examples:
        betas: This is no description.
    """

    lr: float = attrs.field(default=3e-4, validator=attrs.validators.gt(0))
    decay: float = attrs.field(default=0.1, validator=attrs.validators.ge(0))
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: int | None = 10


@attrs.frozen
class Phase:
    start: int
    weights: dict[str, float] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Config:
    """A run.

    Attributes:
        out: Folder of the run.
        steps: Optimizer steps.
    """

    out: Path = Path("runs/a")
    name: str = "run"
    note: str | None = None
    steps: int = 100
    compile: bool = False
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    width: Literal[1, 2] = 1
    resume: Path | None = None
    remat: Literal["none", "full"] | None = "full"
    limit: int | str = 0
    layers: list[int] = attrs.field(factory=lambda: [1, 2])
    tags: tuple[str, ...] = ()
    sources: dict[str, float] = attrs.field(factory=lambda: {"code": 0.7})
    phases: tuple[Phase, ...] = ()
    seed: int = attrs.field(default=0, metadata={"help": "Seed of everything."})
    doubled: int = attrs.Factory(lambda self: 2 * self.steps, takes_self=True)
    model: Model = Model(dim=64, heads=8)
    optim: Optim = attrs.field(factory=Optim)
    draft: Model | None = None


@attrs.frozen
class Needy:
    """Nothing here has a default."""

    vocab: int
    model: Model


def refused(argv: list[str], capsys, cls: type = Config) -> list[str]:
    """The sentences with which ``argv`` is refused."""
    with pytest.raises(SystemExit) as stop:
        load_config(cls, argv, program="train.py")
    assert stop.value.code == 2
    first, *sentences, last = capsys.readouterr().err.splitlines()
    assert first == "train.py: the configuration was refused."
    assert last == "train.py --help lists every key."
    return [sentence.strip() for sentence in sentences]


ACCEPTED = [
    ("steps=5", {"steps": 5}),
    ("--steps=5", {"steps": 5}),
    ("--steps 5", {"steps": 5}),
    ("steps=5 --steps=6", {"steps": 6}),
    ("optim.lr=1", {"optim": Optim(lr=1.0)}),
    ("--optim.decay=inf --seed -1", {"optim": Optim(decay=float("inf")), "seed": -1}),
    ("model.dim=512", {"model": Model(dim=512, heads=8)}),
    ("compile=true name=bf16", {"compile": True, "name": "bf16"}),
    ('name="5"', {"name": "5"}),
    ("name=a=b", {"name": "a=b"}),
    ("out=~/b", {"out": Path.home() / "b"}),
    ("precision=bf16 width=2", {"precision": "bf16", "width": 2}),
    ("optim.warmup=none", {"optim": Optim(warmup=None)}),
    ("note=none", {"note": "none"}),
    ("remat=none", {"remat": "none"}),
    ("draft.dim=16 draft=none", {"draft": None}),
    ("draft=none draft.dim=16", {"draft": Model(dim=16)}),
    ("limit=all", {"limit": "all"}),
    ('tags=["a"]', {"tags": ("a",)}),
    ("sources.prose=0.3", {"sources": {"code": 0.7, "prose": 0.3}}),
    ("sources={prose=0.3} sources.law=1", {"sources": {"prose": 0.3, "law": 1.0}}),
    ('sources={"prose":0.3,"law":1}', {"sources": {"prose": 0.3, "law": 1.0}}),
    ("phases=[{start=5,weights={a=1}}]", {"phases": (Phase(5, {"a": 1.0}),)}),
]


@pytest.mark.parametrize(("line", "changes"), ACCEPTED)
def test_an_override_changes_its_key_and_no_other(line, changes):
    arguments = [argument.strip() for argument in line.split(" ") if argument]
    loaded = load_config(Config, arguments)
    expected = attrs.evolve(Config(), **changes)
    expected = attrs.evolve(expected, doubled=2 * expected.steps)
    assert (loaded, repr(loaded)) == (expected, repr(expected))


USAGE = "write KEY=VALUE, --KEY=VALUE or --config FILE.toml."
REFUSED = [
    ("model.dmi=5", "model.dmi: unknown key; the nearest is model.dim."),
    ("lr=1.0", "lr: unknown key; the nearest is optim.lr."),
    ("qqq=1", "qqq: unknown key; no key resembles it."),
    (f"steps={'x' * 200}", f'steps: expected int, read "{"x" * 56}... (str).'),
    ("optim.lr=nan", "optim.lr: expected float, read NaN (float)."),
    ("steps=5#3", 'steps: expected int, read "5#3" (str).'),
    ("steps=5}\nb={inner=1", 'steps: expected int, read "5}\\nb={inner=1" (str).'),
    ("compile=1", "compile: expected bool, read 1 (int); write true or false."),
    ("name=5", "name: expected str, read 5 (int); quotes make it text: '\"5\"'."),
    ("width=true", "width: expected one of 1, 2, read true (bool)."),
    ("limit=1.5", "limit: expected int | str, read 1.5 (float)."),
    ('layers=[1,"a",2.5]', 'layers[1]: expected int, read "a" (str).'),
    ("optim.betas=[1]", "optim.betas: expected 2 values for tuple[float, float], read [1] (list"),
    ("sources.code=a", 'sources.code: expected float, read "a" (str).'),
    ("phases=[{strat=1}]", "phases[0].strat: unknown key; the nearest is phases[].start."),
    ("model=3 model.dim=4", "model: expected Model, read 3 (int)."),
    ("draft.heads=2", "draft.dim: required, but not given; expected int."),
    *((line, f"{line}: {USAGE}") for line in ("steps", "-x=1", "=1", "model..dim=1", "a.toml")),
    ("steps=5 --compile", f"--compile: {USAGE}"),
    ("--config", f"--config: {USAGE}"),
    ("--config no.toml", "--config: cannot read no.toml (No such file or directory)."),
]


@pytest.mark.parametrize(("line", "sentence"), REFUSED)
def test_a_mistake_is_named_with_its_path(line, sentence, capsys):
    sentences = refused(line.split(" "), capsys)
    assert any(found.startswith(sentence) for found in sentences), sentences


def test_every_mistake_is_named_at_once(tmp_path, capsys):
    file = tmp_path / "a.toml"
    file.write_text("seed = 1.5\n[model]\nheads = 5\n[optim]\nlr = 0\ndecay = -1\n")
    arguments = ["--config", str(file), "stpes=1", "compile", "precision=fp8", "phases=[{}]"]
    assert refused(arguments, capsys) == [
        f"compile: {USAGE}",
        "stpes: unknown key; the nearest is steps.",
        'precision: expected one of fp32, bf16, fp16, read "fp8" (str); the nearest is fp32.',
        "phases[0].start: required, but not given; expected int.",
        "seed: expected int, read 1.5 (float).",
        "model: dim 64 is not divisible by heads 5.",
        "optim.lr: 'lr' must be > 0: 0.0.",
        "optim.decay: 'decay' must be >= 0: -1.0.",
    ]


def test_an_unreadable_file_does_not_blame_the_keys_it_may_have_held(tmp_path, capsys):
    file = tmp_path / "a.toml"
    file.write_text("vocab = 3\nmodel = = 4\n")
    first, *others = refused(["--config", str(file), "vocab=1.5"], capsys, Needy)
    assert first.startswith(f"--config: {file} is not valid TOML: Invalid value (at line 2, ")
    assert others == ["vocab: expected int, read 1.5 (float)."]
    assert refused([], capsys, Needy) == [
        "vocab: required, but not given; expected int.",
        "model.dim: required, but not given; expected int.",
    ]


def test_files_lie_between_defaults_and_overrides_the_last_one_on_top(tmp_path):
    """Some editors begin a file with a mark, which is no part of it."""
    first, file = tmp_path / "first.toml", tmp_path / "a.toml"
    first.write_bytes(b"\xef\xbb\xbfsteps = 1\nname = 'first'\n")
    file.write_text('steps = 7\nseed = 8\nresume = "none"\n[model]\ndim = 24\n[sources]\nlaw = 1\n')
    given = ["seed=9", f"--config={first}", "--config", str(file), "model.max_seq_len=6"]
    config = load_config(Config, given)
    assert (config.steps, config.seed, config.resume, config.name) == (7, 9, None, "first")
    assert config.model == Model(dim=24, heads=8, max_seq_len=6)
    assert config.sources == {"law": 1.0}


def test_a_validator_that_compares_fields_runs_when_both_are_there():
    @attrs.frozen
    class Span:
        low: int
        high: int = attrs.field()

        @high.validator
        def _check(self, attribute: Any, value: int) -> None:
            if value < self.low:
                raise ValueError(f"high {value} is below low {self.low}")

    assert structure(Span, {"low": 1, "high": 2}) == Span(1, 2)
    with pytest.raises(ConfigError, match=r"^high: high 1 is below low 2\.$"):
        structure(Span, {"low": 2, "high": 1})
    with pytest.raises(ConfigError, match=r"^low: required, but not given; expected int\.$"):
        structure(Span, {"high": 1})


def test_a_configuration_survives_json():
    arguments = ["draft.dim=16", "phases=[{start=5,weights={a=1}}]", "resume=a", 'tags=["x"]']
    config = load_config(Config, arguments)
    plain = json.loads(json.dumps(to_dict(config)))
    assert plain["model"] == {"dim": 64, "heads": 8, "max_seq_len": 128}
    assert (plain["resume"], structure(Config, plain)) == ("a", config)
    unbounded = Config(optim=Optim(decay=float("inf")))
    assert structure(Config, to_dict(unbounded) | {"optim": {"decay": "inf"}}) == unbounded


def test_help_lists_every_key_with_type_default_and_description(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        load_config(Config, ["steps=x", "--help"], program="train.py")
    assert stop.value.code == 0
    usage, _, *table = capsys.readouterr().out.splitlines()
    assert usage == "usage: train.py [--config FILE.toml] [KEY=VALUE | --KEY=VALUE ...]"
    rows = {row.split()[0]: " ".join(row.split()) for row in table[1:]}
    leaves = [field.name for field in attrs.fields(Config) if field.name not in ("model", "optim")]
    sections = ("model.", Model), ("draft.", Model), ("optim.", Optim), ("phases[].", Phase)
    leaves += [f"{name}{field.name}" for name, of in sections for field in attrs.fields(of)]
    assert sorted(rows) == sorted(leaves)
    for row in (
        'out Path "runs/a" Folder of the run.',
        'precision fp32 | bf16 | fp16 "fp32"',
        "doubled int computed",
        "seed int 0 Seed of everything.",
        "draft Model | none none",
        "draft.dim int required Width of the residual stream.",
        "optim.lr float 0.0003 Peak learning rate, reached after `warmup` steps.",
        "optim.betas tuple[float, float] [0.9, 0.95]",
    ):
        assert rows[row.split()[0]] == row


@pytest.mark.parametrize(
    ("default", "said"),
    [(None, "steps: expected int, read none"), (-3, "'steps' must be >= 0: -3")],
)
def test_a_default_that_was_edited_in_a_copy_is_checked_like_a_value(default, said, capsys):
    @attrs.frozen
    class Copied:
        steps: int = key(default, "Optimizer steps.", at_least=0)
        lr: float = 0.1

    (sentence,) = refused(["lr=1"], capsys, Copied)
    assert said in sentence
    assert load_config(Copied, ["steps=5"]) == Copied(steps=5)


def test_a_function_beside_a_number_is_left_to_scripts(capsys):
    """A file gives the number; what a script gives stays as it is."""

    @attrs.frozen
    class Balanced:
        rate: float | Callable[[int], float] | None = None
        act: Callable[[float], float] = abs

    assert structure(Balanced, {"rate": 1}).act is abs
    assert structure(Balanced, {"rate": 1}).rate == 1.0
    assert structure(Balanced, {}).rate is None
    with pytest.raises(ConfigError, match=r"^rate: expected float( \| none)?, read \"fast\" \(str"):
        structure(Balanced, {"rate": "fast"})
    with pytest.raises(SystemExit):
        load_config(Balanced, ["--help"])
    assert "rate  float | none " in capsys.readouterr().out
