import importlib
from pathlib import Path

import pytest

from maxdiff import command
from maxdiff.config import KEYS, Config, load_config

BASE = str(Path(__file__).parent.parent / "configs" / "base15.yml")


def refuse(config: Config) -> None:
    raise AssertionError(f"nothing was to be done with {config}")


def test_help_lists_every_key(capsys):
    assert command.run("train.py", ["--help"], refuse) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: train.py CONFIG.yml [OTHER.yml ...] [key=value ...]")
    for key in KEYS:
        assert f"\n{key}: " in shown, key


@pytest.mark.parametrize(
    ("module", "more"),
    [("generate", "[step=N]"), ("evaluate", "[step=N] [--follow]"), ("export", "[step=N]"), ("data.inspect", "[examples=N]")],
)
def test_help_lists_what_a_program_takes_besides(module: str, more: str, capsys):
    assert importlib.import_module(f"maxdiff.{module}").main(["--help"]) == 0
    assert f"[key=value ...] {more} [--print-config] [--help]\n" in capsys.readouterr().out


def test_the_resolved_configuration_is_printed_and_nothing_else_done(capsys, tmp_path: Path):
    assert command.run("train.py", [BASE, "run_name=r", "--print-config", "snr_gamma=5"], refuse) == 0
    (tmp_path / "c.yml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "c.yml") == load_config(BASE, ["run_name=r", "snr_gamma=5"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([BASE, "--verbose"], "there is no option --verbose (allowed: --print-config, --help, and key=value for keys)"),
        (["--print-config"], "which configuration? usage: train.py CONFIG.yml"),
        (["nowhere.yml"], "there is no configuration nowhere.yml"),
        ([BASE, "sed=1"], "there is no key 'sed'; did you mean 'seed'?"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, message: str, capsys):
    assert command.run("train.py", arguments, refuse) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
