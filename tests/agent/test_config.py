"""Settings: what beats what, and a typo is named where it stands."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from agent.config import Config, ConfigError, load_config, parse_config
from agent.machine import choose_machine, find_cdi_dir
from agent.membership import Machine
from agent.tokens import NoToken, find_token, forget_spent
from shared.joining import BadToken, make_token


def parse(text: str, **environment: str) -> Config:
    return parse_config(text.encode(), environment, name="bcd.toml")


def test_an_empty_file_is_the_defaults():
    assert parse("") == Config()
    assert Config().state_dir == Path("/var/lib/bcd")


def test_the_environment_beats_the_file():
    text = 'state_dir = "/a"\ndriver = "nvml"\n[cdi]\ndir = "/b"\nmax_version = "0.7.0"\n'
    assert parse(text).state_dir == Path("/a")
    assert parse(text).cdi_max_version == "0.7.0"
    beaten = parse(text, BCD_STATE_DIR="/c", BCD_CDI_DIR="/d", BCD_DRIVER="host", BCD_SIMULATE="cpu")
    assert (beaten.state_dir, beaten.cdi_dir, beaten.driver, beaten.simulate) == (Path("/c"), Path("/d"), "host", "cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stat_dir = '/x'", "unknown field `stat_dir`"),
        ("[cdi]\nmax-version = '0.5.0'", r"unknown field `max-version` - at `\$.cdi`"),
        ("[cdi]\nmax_version = '0.9.0'", "cdi.max_version: '0.9.0' is none of"),
        ("driver = 'amd'", "driver"),
        ("[log]\nlevel = 'loud'", r"\$.log.level"),
        ("[join]\nurl = 'https://x'", "set both or neither"),
        ("[join]\nurl = 'https://x'\npin = 'sha256:1'", "64 hexadecimal digits"),
        ("state_dir", "bcd.toml"),
        ("\xff", "bcd.toml"),
    ],
)
def test_a_typo_is_named(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parse_config(text.encode("latin-1"), {}, name="bcd.toml")


@pytest.mark.parametrize("name", ["BCD_DRIVER", "BCD_SIMULATE"])
def test_a_typo_in_the_environment_is_named(name: str):
    with pytest.raises(ConfigError, match=f"{name}: 'x' is none of"):
        parse("", **{name: "x"})


def test_a_file_that_was_asked_for_must_be_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "bcd.toml", {})


def test_a_machine_is_what_it_joined_as_unless_told_otherwise():
    joined = Machine(driver="simulated", variant="cpu", name="sim-1", seed="ab", cdi_dir="/cdi")
    assert choose_machine(Config(), joined) == joined
    assert choose_machine(Config(driver="nvml"), joined) == Machine(driver="nvml", cdi_dir="/cdi")
    assert choose_machine(Config(), None) == Machine(driver="auto")
    fresh = choose_machine(Config(simulate="h100"), None, name="gpu-x")
    assert (fresh.driver, fresh.variant, fresh.name) == ("simulated", "h100", "gpu-x")
    # two simulated machines of one name are not one
    assert fresh.seed != choose_machine(Config(simulate="h100"), None, name="gpu-x").seed


def test_a_simulated_machine_has_a_cdi_directory_of_its_own():
    assert find_cdi_dir(Machine(driver="simulated"), Path("/state")) == Path("/state/cdi")
    assert find_cdi_dir(Machine(driver="simulated", cdi_dir="/cdi"), Path("/state")) == Path("/cdi")


# --- tokens --------------------------------------------------------------------------------------


def test_a_token_comes_from_one_of_five_places(tmp_path: Path):
    token = make_token()
    nobody = io.StringIO("")
    file = tmp_path / "token"
    file.write_text(token.text + "\n")
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "join-token").write_text(token.text)
    environment = {"CREDENTIALS_DIRECTORY": str(credentials)}
    assert find_token(token.text, None, {}, nobody) == token
    assert find_token(None, str(file), {}, nobody) == token
    assert find_token(None, "-", {}, io.StringIO(token.text + "\n")) == token
    assert find_token(None, None, {"BCD_JOIN_TOKEN": token.text}, nobody) == token
    assert find_token(None, None, environment, nobody) == token
    (credentials / "join-token").write_text("none")  # the unit's default
    with pytest.raises(NoToken, match="--token-file"):
        find_token(None, None, environment, nobody)


def test_a_bad_token_is_not_repeated_to_whoever_reads_the_screen():
    secret = make_token().text[:-3]
    with pytest.raises(BadToken, match="damaged or cut short") as caught:
        find_token(secret, None, {}, io.StringIO())
    assert secret.partition(".")[2] not in str(caught.value)
    assert "bcctl join-tokens create" in str(caught.value)


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(NoToken, match="nowhere: No such file"):
        find_token(None, str(tmp_path / "nowhere"), {}, io.StringIO())


def test_a_spent_token_is_removed_and_no_other(tmp_path: Path):
    token, other = make_token(), make_token()
    path = tmp_path / "join-token"
    assert not forget_spent(token, path)
    path.write_text(other.text)
    assert not forget_spent(token, path)
    assert path.exists()
    path.write_text(token.text + "\n")
    assert forget_spent(token, path)
    assert not path.exists()
