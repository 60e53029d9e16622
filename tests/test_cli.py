"""The command `lowbit-optim` itself: its entry point, help, `doctor` and `compare`."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer import testing

import lowbit_optim
import lowbit_optim_cli
from lowbit_optim_cli import comparison, models
from lowbit_optim_cli.app import app
from protocol import ENV, ROOT
from test_cli_estimate import refused, run, safetensors

COMMANDS = ("estimate", "inspect", "convert", "doctor", "compare")


def python(script):
    """What a fresh interpreter says of a script, run outside of the checkout."""
    return subprocess.run(
        [sys.executable, "-c", script], env=ENV, cwd=ROOT.anchor, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_help_names_the_commands():
    text = run("--help").stdout
    assert all(command in text for command in COMMANDS)
    assert "--install-completion" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples(command):
    text = run(command, "--help").stdout
    assert f"lowbit-optim {command}" in text.partition("Example")[2]


def test_help_imports_no_torch():
    done = python(
        "import sys\n"
        "from lowbit_optim_cli import main\n"
        "sys.argv = ['lowbit-optim', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_the_package_imports_no_typer():
    done = python("import sys, lowbit_optim; assert 'typer' not in sys.modules")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("gone", "said"), [(["typer"], "typer"), (["typer", "rich"], "typer and")])
def test_without_the_extra_it_says_what_to_install(gone, said, monkeypatch, capsys):
    for name in gone:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as end:
        lowbit_optim_cli.main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lowbit-optim needs {said}")
    assert line.endswith(f"pip install {' '.join(gone)}")


def test_the_entry_point_runs():
    """As the installed command starts, in a process of its own."""
    scripts = importlib.metadata.entry_points(group="console_scripts", name="lowbit-optim")
    command = [sys.executable, "-m", "lowbit_optim_cli"]
    beside = Path(sys.executable).with_name("lowbit-optim")
    if scripts and beside.exists():
        command = [str(beside)]
    for arguments, code in ((["estimate", "64x64", "--json"], 0), (["estimate", "64xx"], 2)):
        done = subprocess.run(
            [*command, *arguments], env=ENV, cwd=ROOT.anchor, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == code
        assert "Traceback" not in done.stderr
        if code == 0:
            assert json.loads(done.stdout)["parameters"] == 4096
        else:
            assert done.stderr.startswith("lowbit-optim: '64xx' is no model")


def test_usage_errors_are_one_sentence():
    assert "No such option" in refused("estimate", "4x4", "--nothing")
    assert "Missing argument" in refused("estimate")
    assert "--shards" in refused("estimate", "4x4", "--shards", "many")
    for path in ("nowhere.pt", os.devnull):
        assert "there is no file or folder" in refused("inspect", path)
    assert "No such option: --nothing" in refused("--nothing", "estimate", "4x4")
    assert refused("convert", "in.pt", "out.pt").endswith(
        "Missing option '--to'. Choose from: torch, bitsandbytes, lowbit"
    )
    assert refused("estimate", "4x4", "--dtype", "fp64").endswith(
        "Invalid value for '--dtype': 'fp64' is not one of 'bf16', 'fp32', 'fp16'."
    )


def test_the_version_is_the_package_s():
    for more in ((), ("estimate", "64xx")):
        result = run("--version", *more)
        assert (result.exit_code, result.stdout) == (
            0,
            f"lowbit_optim {lowbit_optim.__version__}\n",
        )


def test_without_arguments_there_is_help():
    result = run()
    assert "Usage" in result.output
    assert "lowbit-optim: " not in result.output


def test_a_reader_that_has_enough_is_told_nothing():
    """As `| head` does; standard error would be the user's terminal."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "lowbit_optim_cli", "estimate", "64x64", "--json"]
    done = subprocess.run(
        command, env=ENV, cwd=ROOT.anchor, stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("encoding", "name", "said"),
    [("ascii", "gewicht-ü", "gewicht-\\xfc"), ("utf-8", "w\ud800", "w\\ud800")],
)
def test_names_that_the_output_cannot_write_are_escaped(tmp_path, encoding, name, said):
    path = safetensors(tmp_path / "model.safetensors", {name: ("F32", [64, 64])})
    for command in ("estimate", "inspect"):
        done = subprocess.run(
            [sys.executable, "-m", "lowbit_optim_cli", command, path], cwd=ROOT.anchor,
            env={**ENV, "PYTHONIOENCODING": encoding}, capture_output=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, b"")
        assert said in done.stdout.decode(encoding)


def completed(words):
    env = {"_LOWBIT_OPTIM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "3"}
    said = testing.CliRunner().invoke(app, [], prog_name="lowbit-optim", env=env).output
    return said.split()


def test_the_shell_completes_commands_and_optimizers():
    assert completed("lowbit-optim estimate --optimizer Ad") == [
        "Adam", "AdamW", "AdEMAMix", "Adagrad",
    ]  # fmt: skip


def test_the_shell_proposes_all_where_it_is_taken():
    for command, number in (("estimate", 1), ("compare", 0)):
        assert completed(f"lowbit-optim {command} --optimizer al").count("all") == number


def test_doctor_names_the_engine_of_each_dtype():
    found = json.loads(run("doctor", "--json").stdout)
    assert found["versions"]["torch"] == torch.__version__
    rows = {(row["device"], row["dtype"]): row for row in found["engines"]}
    assert rows["cpu", "float64"]["engine"] == "torch"
    assert "does not take torch.float64" in rows["cpu", "float64"]["reason"]
    assert {row["engine"] for row in found["engines"]} <= {"numba", "torch", "triton"}
    folder = found["cache"]["folder"]
    assert folder is None or Path(folder).is_dir()
    text = " ".join(run("doctor").stdout.split())
    assert "float64" in text
    assert f"torch {torch.__version__}" in text


def test_doctor_says_what_was_asked_for_and_cannot_be(monkeypatch):
    monkeypatch.setenv("LOWBIT_OPTIM_ENGINE", "nothing")
    found = json.loads(run("doctor", "--json").stdout)
    assert found["asked"] == "nothing"
    assert all(row["engine"] == "none" for row in found["engines"])
    assert "must be one of auto" in found["engines"][0]["reason"]


def test_compare_trains_every_format():
    result = run("compare", "--optimizer", "AdamW8bit", "--steps", "30", "--json")
    assert result.exit_code == 0, result.output
    rows = {(row["optimizer"], row["format"]): row for row in json.loads(result.stdout)}
    assert len(rows) == 5
    torchs, ours = rows["torch.optim.AdamW", "as weights"], rows["AdamW32bit", "float32"]
    assert ours["loss"] == pytest.approx(torchs["loss"], rel=1e-3)
    for (_, format), row in rows.items():
        assert row["loss"] == pytest.approx(torchs["loss"], rel=0.02), format
        assert row["loss"] < 3.4  # a uniform guess has log(32) = 3.466
    assert rows["AdamW4bit", "ratio4"]["state_bytes"] < 1.2 < ours["state_bytes"]


def test_compare_shows_a_table():
    result = run("compare", "-o", "Lion", "--steps", "1")
    assert result.exit_code == 0, result.output
    assert "Lion8bit" in result.stdout
    assert "1 step of one model" in " ".join(result.stdout.split())
    assert "unknown optimizer 'Lyon'; did you mean Lion" in refused("compare", "-o", "Lyon")


def test_the_data_of_compare_can_be_learned():
    chain = comparison.Chain(0)
    x, y = chain.batch()
    entropy = -(chain.chances * chain.chances.log()).sum(-1).mean()
    assert x.shape == (comparison.BATCH, 2)
    assert int(y.max()) < comparison.SYMBOLS
    assert entropy < 0.6 * torch.tensor(float(comparison.SYMBOLS)).log()


PAGE = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")


def test_the_page_has_what_the_command_prints():
    (block,) = re.findall(r"^```console\n\$ lowbit-optim (.*?)\n(.*?)^```$", PAGE, re.S | re.M)
    arguments, shown = block
    lines = [line.rstrip() for line in run(*arguments.split()).stdout.splitlines()]
    assert shown.splitlines() == lines[: len(shown.splitlines())]


def test_the_page_runs(capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
    exec(compile(block, "command_line.md", "exec"), {})
    state, residual, total = map(int, capsys.readouterr().out.split())
    rows = json.loads(run("estimate", "4096x4096,4096", "--dtype", "bf16", "--json").stdout)["rows"]
    (row,) = [r for r in rows if (r["format"], r["master_weight_bits"]) == ("dynamic8", 24)]
    assert (state, residual, total) == (row["state"], row["residual"], row["sum"])


def test_the_page_names_every_option():
    for command in COMMANDS:
        said = run(command, "--help").stdout
        assert f"lowbit-optim {command}" in PAGE
        if command == "estimate":
            assert all(
                option in PAGE
                for option in re.findall(r"--[a-z][-a-z0-9]+", said)
                if option != "--help"
            )


@pytest.mark.parametrize(
    ("said", "dtype", "noted"),
    [
        ("torch.bfloat16", "bf16", False),
        ("auto", "fp32", True),
        ("float8_e4m3fn", "fp32", True),
        (None, "fp32", False),
    ],
)
def test_the_dtype_of_a_configuration(said, dtype, noted, tmp_path):
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 1,
        "n_positions": 16, "vocab_size": 100, "dtype": said,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    model = models.read_model(str(path))
    assert {weight.dtype for weight in model.weights} == {dtype}
    assert any(repr(said) in note for note in model.notes) == noted
    assert not models.read_model(str(path), "fp16").notes


@pytest.mark.parametrize("own", [None, "float32"])
def test_a_configuration_without_a_dtype_has_that_of_its_part_for_text(tmp_path, own):
    """As those of Qwen3-VL: transformers loads the weights in it."""
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 1,
        "n_positions": 16, "vocab_size": 100, "text_config": {"dtype": "bfloat16"}, "dtype": own,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    weights = models.read_model(str(path)).weights
    assert {weight.dtype for weight in weights} == {"fp32" if own else "bf16"}
