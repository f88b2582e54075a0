"""Commands and settings that have to end with code 2 and say why, before anything is done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from runs import load_recipe

from forgekit.cli import main
from forgekit.config import load_config
from forgekit.config.schema import keys_of, name_of

pytestmark = pytest.mark.bad_input

COMMANDS = {
    "no such command": (["reports"], r"invalid choice: 'reports' (choose from "),
    "no recipe named": (["cp"], "the following arguments are required: NAME"),
    "no recipe to plan": (["plan"], "the following arguments are required: RECIPE\n"),
    "no recipe to compare": (["verify"], "the following arguments are required: RECIPE\n"),
    "too much": (["ls", "x"], "unrecognized arguments: x"),
    "colours": (["ls", "\x1b[31m"], r"unrecognized arguments: '\x1b[31m'"),
    "a recipe in colours": (["run", "\x1b[31m"], r"no recipe '\x1b[31m'. There are: "),
    "a recipe that ends the title": (["cp", "\x1b]0;x\x07"], r"no recipe '\x1b]0;x\x07'"),
    "a copy in colours": (["cp", "minimal", "\x1b.txt"], r"\x1b.txt is neither a .py file nor a"),
    "a copy below a file": (
        ["cp", "minimal", "a.txt/b.py"],
        "nothing was copied, a.txt: File exists.",
    ),
    "a copy where nobody writes": (
        ["cp", "minimal", "/proc/a/b.py"],
        "nothing was copied, /proc/a: No such file or directory.",
    ),
    "a copy with too long a name": (
        ["cp", "minimal", "a" * 300 + ".py"],
        "File name too long.",
    ),
    "a step in letters": (["replay", "gone", "--step", "x"], "invalid int value: 'x'"),
    "a script that is not there": (
        ["replay", "gone", "--step", "3", "--script", "gone.py"],
        "gone is no run directory. Name what a recipe's out= was.",
    ),
    "a run in colours": (["replay", "\x9b31m"], r"\x9b31m is no run directory. "),
    "no such recipe": (["run", "pretrian"], "no recipe 'pretrian'; the nearest is 'pretrain'. "),
    "a copy that would not run": (
        ["cp", "minimal", "a.txt"],
        "a.txt is neither a .py file nor a folder that exists.",
    ),
    "a source that is not there": (
        ["prepare", "gone", "--out", "o"],
        "gone does not exist; name an existing file or folder.",
    ),
    "nowhere to go": (["prepare", "a.txt"], "the following arguments are required: --out"),
    "a file in the way": (
        ["prepare", "a.txt", "--out", "a.txt"],
        "a.txt is a file; name a directory that does not exist yet.",
    ),
    "a vocabulary of letters": (
        ["prepare", "a.txt", "--out", "o", "--vocab", "x"],
        "argument --vocab: 'x' is not a whole number of at most 18 digits",
    ),
    "a vocabulary that is too small": (
        ["prepare", "a.txt", "--out", "o", "--vocab", "10"],
        "vocab_size 10 must be at least 257.",
    ),
    "a picture": (
        ["prepare", "a.png", "--out", "o"],
        "a.png is not UTF-8: byte 0x89 at position 0. Convert it (iconv -t UTF-8) or leave it out.",
    ),
    "all held out": (
        ["prepare", "a.txt", "--out", "o", "--held-out-every", "1"],
        "held_out_every 1 must be at least 2",
    ),
    **{
        f"a {'vocabulary' if option == '--vocab' else 'held-out part'} of {name}": (
            ["prepare", "a.txt", "--out", "o", option, text],
            f"argument {option}: {shown} is not a whole number of at most 18 digits",
        )
        for option in ("--vocab", "--held-out-every")
        for name, text, shown in (
            ("nothing", "", "''"),
            ("a fraction", "2.5", "'2.5'"),
            ("a power", "1e4", "'1e4'"),
            ("not a number", "nan", "'nan'"),
            ("5,000 digits", "9" * 5000, f"'{'9' * 56}..."),
            ("an escape", "\x1b[2J", "'\\x1b[2J'"),
        )
    },
    "a vocabulary of a billion": (
        ["prepare", "a.txt", "--out", "o", "--vocab", f"{10**12}"],
        "vocab_size 1000000000000 must be at most 4,194,304.",
    ),
    "a negative vocabulary": (
        ["prepare", "a.txt", "--out", "o", "--vocab", "-300"],
        "vocab_size -300 must be at least 257.",
    ),
    **{
        f"a source of {name}": (["prepare", source, "--out", "o"], message)
        for name, source, message in (
            ("nothing", "", 'a path is empty; name a file or folder. "." is the current folder.'),
            ("nobody's home", "~nosuchuser", "~nosuchuser does not exist; name an existing file"),
            ("zeros without end", "/dev/zero", "is neither a file nor a folder, but a pipe or a d"),
            ("escapes", "\x1b[31m", "\\x1b[31m does not exist; name an existing file or folder."),
            ("bytes", "\udcff", "\\udcff does not exist; name an existing file or folder."),
            ("too long a name", "x" * 300, "has a name of 300 bytes; a file system takes 255."),
            ("too long a path", "x/" * 3000, "is a path of 6,000 characters; a system takes 4,095"),
            ("a part of a file", "a.txt/b", "a.txt/b does not exist; name an existing file or fo"),
            ("a dataset without a name", "hf:", "the dataset's name is empty; name a file or fol"),
            ("the root for a dataset", "hf:/", "/ holds more than 10,000 files and folders, whic"),
            (
                "no dataset at all",
                "hf:gone/away/far",
                "gone/away/far is no folder. Name a folder of",
            ),
            ("a dataset above", "hf:../gone", "../gone is no folder. Name a folder of data files"),
            ("a dataset at home", "hf:~/gone", "~/gone is no folder. Name a folder of data files"),
            (
                "a file for a dataset",
                "hf:./a.txt",
                "./a.txt is no folder. Name a folder of data fi",
            ),
            (
                "the messages of the system",
                "/proc/kmsg",
                "there is no text to prepare: 0 documents",
            ),
            ("the memory", "/proc/self/mem", "there is no text to prepare: 0 documents are bro"),
        )
    },
    **{
        f"a target that is {name}": (["prepare", "a.txt", "--out", out], message)
        for name, out, message in (
            (
                "this folder",
                ".",
                "is the folder that this runs in and cannot be replaced",
            ),
            (
                "nothing",
                "",
                "is the folder that this runs in and cannot be replaced",
            ),
            ("above this folder", "..", "is the folder that this runs in and cannot be replaced"),
            (
                "the root",
                "/",
                "/ is a mount point and cannot be replaced; name a folder",
            ),
            (
                "a mount",
                "/proc",
                "/proc is a mount point and cannot be replaced; name a fo",
            ),
            ("a device", "/dev/null", "/dev/null is a file; name a directory that does not exist"),
            ("below a file", "a.txt/o", "File exists: "),
            ("of bytes", "\udcff", "out '\\udcff' is not UTF-8; choose another name."),
            ("too long a name", "x" * 300, "has a name of 300 bytes; a file system takes 255."),
            ("too long a path", "x/" * 3000, "is a path of 5,999 characters; a system takes 4,095"),
        )
    },
    **{
        f"a tokenizer that is {name}": (
            ["prepare", "a.txt", "--out", "o", "--tokenizer", file],
            message,
        )
        for name, file, message in (
            ("not there", "gone.json", "gone.json does not exist. `forgekit prepare` writes one"),
            ("a text", "a.txt", "a.txt is not a tokenizer: expected "),
            (
                "the memory",
                "/proc/self/mem",
                "/proc/self/mem is empty. Name what the tokenizers pac",
            ),
            ("a device", "/dev/zero", "/dev/zero does not exist. `forgekit prepare` writes one be"),
            (
                "a folder",
                ".",
                "tokenizer.json does not exist. `forgekit prepare` writes one",
            ),
            ("an escape", "\x1b[2J", "\\x1b[2J does not exist. `forgekit prepare` writes one"),
            ("too long", "x" * 300, "has a name of 300 bytes; a file system takes 255."),
        )
    },
    **{
        f"a closing token that is {name}": (
            ["prepare", "a.txt", "--out", "o", "--eos-token", token],
            f"eos_token is {shown}; a tokenizer that is trained here closes documents with",
        )
        for name, token, shown in (
            ("none", "", "''"),
            ("a letter", "x", "'x'"),
            ("another one", "</s>", "'</s>'"),
            ("an escape", "\x1b[31m", "'\\x1b[31m'"),
            ("long", "x" * 5000, f"'{'x' * 56}..."),
        )
    },
    "an option of escapes": (
        ["prepare", "a.txt", "--out", "o", "--\x1b[31m=1"],
        "unrecognized arguments: '--\\x1b[31m=1'",
    ),
    "an option without its value": (
        ["prepare", "a.txt", "--out", "o", "--vocab"],
        "argument --vocab: expected one argument",
    ),
    "a value for a switch": (
        ["prepare", "a.txt", "--out", "o", "--skip-broken=1"],
        "argument --skip-broken: ignored explicit argument '1'",
    ),
    "a command of escapes": (["\x1b]0;a\x07"], "invalid choice: '\\x1b]0;a\\x07' (choose from "),
    "files beside a dataset": (
        ["prepare", "hf:a", "a.txt", "--out", "o"],
        "hf:a is given beside other sources. Prepare each into a folder of its own, and mix them",
    ),
    "a run that is not there": (
        ["replay", "gone"],
        "gone is no run directory. Name what a recipe's out= was.",
    ),
    "no recipe to verify": (
        ["verify", "gone.py", "mesh.tp=2"],
        "gone.py is not there; name a recipe's file, or one of `forgekit ls`.",
    ),
    "a folder as a recipe": (["diff", "."], ". is a folder; name a file that `forgekit cp` wrote."),
    "a recipe to verify that has no name": (
        ["verify", "pretrian"],
        "no recipe 'pretrian'; the nearest is 'pretrain'. ",
    ),
    "a recipe without a set-up": (
        ["verify", "minimal"],
        "minimal.py has no Config, setup; a recipe that this command can set up has Config",
    ),
    "an unknown dimension": (
        ["verify", "pretrain", "mesh.tq=2"],
        "mesh.tq: unknown key; the nearest is mesh.tp",
    ),
    "two dimensions without a size": (
        ["verify", "pretrain", "mesh.tp=-1"],
        "mesh: dp_shard and tp are both -1; only one can be what is left",
    ),
    "experts beyond the ranks": (
        ["verify", "pretrain", "mesh.ep=2"],
        "ep 2 does not divide dp_shard * cp = 1; it can be one of [1].",
    ),
    "a tolerance of nothing": (
        ["verify", "--tolerance", "0", "pretrain", "mesh.tp=2"],
        "tolerance 0.0 must be above 0 and below 1.",
    ),
    "a tolerance that is no number": (
        ["verify", "--tolerance", "x", "pretrain"],
        "argument --tolerance: invalid float value: 'x'",
    ),
    "no time": (
        ["verify", "--timeout", "inf", "pretrain", "mesh.tp=2"],
        "timeout_s inf must be finite and above 0.",
    ),
    **{
        f"a {what} with {name}": (command, message)
        for name, text, message in (
            ("too long a name", "x" * 300, "has a name of 300 bytes; a file system takes 255."),
            ("too long a path", "x/" * 3000, "is a path of 6,000 characters; a system takes 4,095"),
            ("no name", "", "the path is empty; name a file or folder"),
        )
        for what, command in (
            ("run to replay", ["replay", text]),
            ("script to replay", ["replay", "gone", "--script", text]),
            ("recipe to verify", ["verify", text]),
        )
    },
    "a recipe to verify that says nothing": (
        ["verify", "empty.py"],
        "empty.py is empty; name a recipe's file, or one of `forgekit ls`.",
    ),
    "a step before the first": (
        ["replay", "gone", "--step", "0"],
        "--step 0: steps are counted from 1, as in metrics.jsonl.",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_that_cannot_be_ends_with_code_2(
    arguments, message, tmp_path, monkeypatch, capsys
):
    (tmp_path / "a.txt").write_text("to be or not to be")
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    (tmp_path / "empty.py").touch()
    monkeypatch.chdir(tmp_path)
    try:
        code = main(arguments)
    except SystemExit as stop:  # argparse's own
        code = stop.code
    assert code == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""
    assert len(shown.err) < 900
    assert shown.err.replace("\n", "").isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.txt", "empty.py"]


FILES = {
    "no TOML": (b"a = = 1", "is not valid TOML: Invalid value (at line 1, column 5)."),
    "JSON": (b'{"steps": 1}', "is not valid TOML: Invalid statement (at line 1, column 1)."),
    "bytes": (b"\xff\xfe\x00", "is not valid TOML: 'utf-8' codec can't decode byte 0xff"),
    "a key given twice": (b"steps = 1\nsteps = 2\n", "is not valid TOML: Cannot overwrite a value"),
    "half a file": (b"[optim]\nlr = ", "is not valid TOML: Invalid value"),
    "text for a number": (b'[optim]\nlr = "x"\n', 'optim.lr: expected float, read "x" (str).'),
    "a slip": (b"[model]\nlayer = 2\n", "model.layer: unknown key; the nearest is model.layers."),
    "a fraction": (b"steps = 1.5\n", "steps: expected int, read 1.5 (float)."),
    "a mark and a slip": (b"\xef\xbb\xbfstep = 1\n", "step: unknown key; the nearest is steps."),
    "UTF-16": ("steps = 1".encode("utf-16"), "is not valid TOML: 'utf-8' codec can't decode byte"),
    "a NUL": (b"steps = 1\0\n", "is not valid TOML: "),
    "5,000 digits": (b"steps = " + b"9" * 5000, "TOML: an integer has more than 4,300 digits."),
    "5,000 digits in a phase": (
        b"phases = [{start = -" + b"9" * 5000 + b"}]",
        "a.toml is not valid TOML: an integer has more than 4,300 digits.",
    ),
    "3,000 lists": (b"steps = " + b"[" * 3000, "TOML: brackets are nested too deeply."),
    "3,000 lists that close": (
        b"steps = " + b"[" * 3000 + b"]" * 3000,
        "a.toml is not valid TOML: brackets are nested too deeply.",
    ),
    "3,000 tables": (b"steps = " + b"{a=" * 3000, "TOML: brackets are nested too deeply."),
    "3,000 sections": (b"steps" + b".a" * 3000 + b" = 1", "steps: expected int, read values nes"),
    "a section of escapes": (
        b'"\\u001B[2J" = 1',
        "\\x1b[2J: unknown key; no key resembles it.",
    ),
    "a section given twice": (b"[optim]\n[optim]\n", "is not valid TOML: Cannot declare ('optim',"),
    "a section inside a number": (b"steps = 1\n[steps]\n", "is not valid TOML: Cannot"),
    "beyond int64": (
        b"steps = 9223372036854775808",
        "steps: read 9223372036854775808; the largest integer is 2**63 - 1",
    ),
    "a NUL in a path": (b'out = "a\\u0000b"', "out: the path 'a\\x00b' holds a NUL character"),
    "a half of a pair": (
        b'out = "\\uD800"',
        "is not valid TOML: Escaped character is not a Unicode",
    ),
    "a date": (b"steps = 2020-01-01\n", "steps: expected int, read "),
    "a list for a section": (b"mesh = [1]\n", "mesh: expected MeshSpec, read [1] (list)."),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
def test_a_file_of_settings_that_cannot_be_ends_with_code_2(content, message, tmp_path, capsys):
    (tmp_path / "a.toml").write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        load_config(load_recipe("pretrain").Config, ["--config", str(tmp_path / "a.toml")])
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown) < 700
    assert shown.replace("\n", "").isprintable()


SETTINGS = {
    "not a file": ("--config .", "--config: cannot read . (Is a directory)."),
    "no such file": ("--config gone.toml", "--config: cannot read gone.toml (No such file or dir"),
    "an endless file": ("--config /dev/zero", "cannot read /dev/zero (It is neither a file nor a"),
    "a file below a file": (f"--config {__file__}/a", "(Not a directory)."),
    "a name too long for a file": (f"--config {'x' * 300}", "(File name too long)."),
    "a negative number of steps": ("steps=-1", "steps: 'steps' must be >= 0: -1."),
    "a rate that is not a number": (
        "optim.lr=nan",
        "optim.lr: read nan, which is not a number; write one, or",
    ),
    "a negative rate": ("optim.lr=-1", "optim.lr: 'lr' must be >= 0: -1.0."),
    "rows of metrics never": ("log_every=0", "log_every: 'log_every' must be >= 1: 0."),
    "rows of metrics before": ("log_every=-1", "log_every: 'log_every' must be >= 1: -1."),
    "saving before": ("save_every=-1", "save_every: 'save_every' must be >= 0: -1."),
    "evaluating before": ("eval_every=-5", "eval_every: 'eval_every' must be >= 0: -5."),
    "no rows in a step": ("global_batch_size=0", "'global_batch_size' must be >= 1: 0."),
    "no rows in a micro-batch": ("batch_size=0", "batch_size: 'batch_size' must be >= 1: 0."),
    "fewer than no threads": ("data.workers=-1", "data.workers: 'workers' must be >= 0: -1."),
    "no places": ("data.seq_len=0", "data.seq_len: 'seq_len' must be >= 1: 0."),
    "growth for decay": ("optim.weight_decay=-0.1", "'weight_decay' must be >= 0: -0.1."),
    "a warm-up before": ("optim.warmup=-1", "optim.warmup: 'warmup' must be >= 0: -1."),
    "patience of none": ("patience=0", "patience: 'patience' must be >= 1: 0."),
    "nothing to go on from": ("prompt=", "prompt: Length of 'prompt' must be >= 1: 0."),
    "nothing kept": ("keep=-1", "keep: 'keep' must be >= 1: -1."),
    "a number for a folder": ("out=3", "out: expected Path, read 3 (int); quotes make it text"),
    "a word for a seed": ("seed=x", 'seed: expected int, read "x" (str).'),
    **{
        f"{name} beyond int64": (
            f"{name}={10**20}",
            f"{name}: read {10**20}; the largest integer is 2**63 - 1 = 9,223,372,036,854,775,807.",
        )
        for name in ("steps", "batch_size", "data.seq_len", "data.workers", "mesh.tp", "model.dim")
    },
    **{
        f"{name} of 5,000 digits": (
            f"{name}={'9' * 5000}",
            f"{name}: '{'9' * 56}... cannot be read: an integer has more than 4,300 digits.",
        )
        for name in ("seed", "steps", "optim.lr", "out")
    },
    **{
        f"{name} of 3,000 brackets": (
            f"{name}={'[' * 3000}",
            f"{name}: '{'[' * 56}... cannot be read: brackets are nested too deeply.",
        )
        for name in ("steps", "prompt", "data.path", "model")
    },
    **{
        f"{name} that is not a number": (
            f"{name}=nan",
            f"{name}: read nan, which is not a number; write one, or inf for no bound.",
        )
        for name in ("max_norm", "spikes", "optim.weight_decay", "model.rope_theta")
    },
    "a rate beyond floats": (f"optim.lr={10**400}", "optim.lr: expected float, read 1000000000000"),
    "text before a rate": ("optim.lr=1e-4x", 'optim.lr: expected float, read "1e-4x" (str).'),
    "a comma in a rate": ("optim.lr=0,1", 'optim.lr: expected float, read "0,1" (str).'),
    "a home of nobody": ("out=~nosuchuser/a", 'out: "~nosuchuser" has no home folder here; write'),
    "nowhere": (
        "out=",
        'out: the path is empty; name a file or folder. "." is the current folder.',
    ),
    "data from nowhere": ("data.path=", "data.path: the path is empty; name a file or folder."),
    "a name too long": (
        f"out=a/{'x' * 256}",
        "has a name of 256 bytes; a file system takes 255. Choose",
    ),
    "a long name of two bytes each": (f"out={'é' * 128}", "has a name of 256 bytes; a file system"),
    "a colour": ("steps=\x1b[31m", 'steps: expected int, read "\\u001b[31m" (str).'),
    "a colour of one byte": ("steps=\x9b31m", 'steps: expected int, read "\\x9b31m" (str).'),
    "writing from right to left": ("steps=\u202e1", 'steps: expected int, read "\\u202e1" (str).'),
    "bytes that are no text": ("steps=\udcff", 'steps: expected int, read "\\udcff" (str).'),
    "a key of escapes": ("\x1b[2J=1", "\\x1b[2J: unknown key; no key resembles it."),
    "an option of escapes": (
        "--\x1b]0;a\x07",
        "--\\x1b]0;a\\x07: unknown argument; write KEY=VALUE",
    ),
    "a key of 3,000 letters": (f"{'x' * 3000}=1", f"{'x' * 97}...: unknown key; no key resembles"),
    "a key of 3,000 sections": (f"steps{'.a' * 3000}=1", "steps: expected int, read values nested"),
    "a number for a switch": ("compile=0", "compile: expected bool, read 0 (int)."),
    "yes": ("compile=yes", 'compile: expected bool, read "yes" (str); write true or false.'),
    "a list of paths": ('data.path=["a","b"]', 'data.path: expected Path, read ["a", "b"] (list)'),
    "a switch for a number": ("seed=true", "seed: expected int, read true (bool)."),
    "a list for a section": ("optim=[]", "optim: expected Optim, read [] (list)."),
    "half a rank": ("mesh.tp=1.5", "mesh.tp: expected int, read 1.5 (float)."),
    "ranks of nothing": ("mesh.pp=0", "mesh: pp is 0; a mesh dimension is at least 1, or -1 once."),
    "no layers": ("model.layers=0", "model: layers is 0; it must be at least 1."),
    "certain dropout": ("model.dropout=1.5", "model: dropout 1.5 must be at least 0 and below 1."),
    "bits": ("precision=16", "precision: expected one of fp32, bf16, fp16, read 16 (int); the nea"),
    "recomputing all": (
        "activation_checkpoint=all",
        "activation_checkpoint: expected one of none, full, selective, budget, read",
    ),
    "a schedule that is none": (
        "pipeline_schedule=x",
        "pipeline_schedule: expected one of gpipe, 1f1b, interleaved_1f1b, ",
    ),
    "a way to share that is none": (
        "context_parallel=star",
        'context_parallel: expected one of ring, ulysses, both, read "star" (str).',
    ),
}


@pytest.mark.parametrize(("line", "message"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_of_a_recipe_that_cannot_be_ends_with_code_2(line, message, capsys):
    with pytest.raises(SystemExit) as stop:
        load_config(load_recipe("pretrain").Config, line.split(" "))
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown) < 700
    assert shown.replace("\n", "").isprintable()


MAY_BE_INFINITE = ("max_norm", "data.temperature")


def numbers_of(recipe):
    """Settings of each number that a recipe reads: below 0 and not finite."""
    for key in keys_of(load_recipe(recipe).Config):
        kinds = {kind for kind in (int, float) if kind.__name__ in name_of(key.kind).split()}
        is_table = name_of(key.kind) == "dict[str, float]"
        if not kinds and not is_table:
            continue
        for value in ("-2", *(("nan", "-inf", "inf") if float in kinds or is_table else ())):
            if value == "inf" and key.name in MAY_BE_INFINITE:
                continue
            name = f"{key.name}.mail" if is_table else key.name
            section, _, inner = name.rpartition("[].")
            given = f"{section}=[{{step=1,{inner}={value}}}]" if section else f"{name}={value}"
            yield f"{recipe} {given.replace('step=1,step', 'step')}"


NUMBERS = [
    line
    for name in ("pretrain", "curriculum", "pipeline", "long_context")
    for line in numbers_of(name)
]


SCALED = [f"model.rope_scaling.{p}" for p in ("kind=yarn", "factor=2", "original_max_seq_len=64")]
"""What a scaled rotary embedding needs beside the setting that is tried."""


@pytest.mark.parametrize("line", NUMBERS)
def test_a_number_below_0_or_not_finite_ends_with_code_2(line, capsys):
    recipe, setting = line.split(" ")
    needed = [pair for pair in SCALED if setting.startswith("model.rope_scaling.")]
    with pytest.raises(SystemExit) as stop:
        load_config(load_recipe(recipe).Config, [*needed, setting])
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    rule = r"must be (>=|finite|at least|an integer|positive)|which is not a number|is -2; a mesh"
    assert re.search(rule, shown), shown


def test_a_mark_at_the_start_of_a_file_of_settings_is_no_part_of_it(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbfsteps = 7\n")
    config = load_config(load_recipe("pretrain").Config, ["--config", str(tmp_path / "a.toml")])
    assert config.steps == 7


@pytest.mark.parametrize("content", [None, b""])
def test_a_file_of_no_size_says_nothing(content, tmp_path):
    """Those of the system have none: reading this one fails, reading /proc/kmsg never ends."""
    path = Path("/proc/self/mem") if content is None else tmp_path / "a.toml"
    if content is not None:
        path.write_bytes(content)
    recipe = load_recipe("pretrain")
    assert load_config(recipe.Config, ["--config", str(path)]) == recipe.Config()


def test_a_folder_without_data_is_refused_before_it_is_searched(tmp_path, monkeypatch, capsys):
    for number in range(3):
        (tmp_path / "a" / "b").mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / "b" / f"{number}.py").write_text("x = 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", None)
    assert main(["prepare", "hf:a", "--out", "o"]) == 2
    assert "a holds no data file among 4 files and folders; those" in capsys.readouterr().err
