"""Which server, and as whom: precedence, the file, and keys that go to their own server alone."""

from __future__ import annotations

import io
import stat
from typing import TYPE_CHECKING

import pytest

from controlplane.cli.profiles import (
    Profile,
    ProfileError,
    Setting,
    config_path,
    load_profiles,
    resolve_connection,
    write_profile,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.command_line import CommandLine


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def test_nothing_is_set(environ: dict[str, str]) -> None:
    found = resolve_connection(environ=environ)
    assert found.url == Setting("http://127.0.0.1:3000", "the default")
    assert found.key is None
    assert "no --key, no BCCTL_KEY, and no profile" in found.key_hint


def test_flag_over_environment_over_profile_over_default(environ: dict[str, str]) -> None:
    write_profile("dev", "http://dev:1", "bck_dev", environ=environ)
    found = resolve_connection(environ=environ)
    assert (found.url, found.key) == (Setting("http://dev:1", "profile dev"), Setting("bck_dev", "profile dev"))
    environ |= {"BCCTL_URL": "http://env:1", "BCCTL_KEY": "bck_env"}
    found = resolve_connection(environ=environ)
    assert (found.url, found.key) == (Setting("http://env:1", "BCCTL_URL"), Setting("bck_env", "BCCTL_KEY"))
    found = resolve_connection(url="http://flag:1", key="bck_flag", environ=environ)
    assert (found.url, found.key) == (Setting("http://flag:1", "--url"), Setting("bck_flag", "--key"))


def test_the_profile_itself_has_the_same_precedence(environ: dict[str, str]) -> None:
    for name in ("one", "two", "three"):
        write_profile(name, f"http://{name}", f"bck_{name}", environ=environ)
    assert resolve_connection(environ=environ).url.value == "http://one"
    environ["BCCTL_PROFILE"] = "two"
    assert resolve_connection(environ=environ).url.value == "http://two"
    assert resolve_connection(profile="three", environ=environ).url.value == "http://three"
    with pytest.raises(ProfileError, match=r"--profile: there is no profile 'four' in .*; there are: one, three, two"):
        resolve_connection(profile="four", environ=environ)
    environ["BCCTL_PROFILE"] = "five"
    with pytest.raises(ProfileError, match="BCCTL_PROFILE: there is no profile 'five'"):
        resolve_connection(environ=environ)


def test_a_profiles_key_goes_to_its_own_server_alone(environ: dict[str, str]) -> None:
    write_profile("dev", "http://dev:1", "bck_dev", environ=environ)
    found = resolve_connection(url="http://elsewhere", environ=environ)
    assert found.key is None
    assert "the key of profile dev is for http://dev:1 alone" in found.key_hint
    assert resolve_connection(url="http://dev:1/", environ=environ).key == Setting("bck_dev", "profile dev")


def test_where_the_file_is(tmp_path: Path) -> None:
    assert config_path({"HOME": "/h"}).as_posix() == "/h/.config/bettercompute/config.toml"
    assert config_path({"HOME": "/h", "XDG_CONFIG_HOME": "/x"}).as_posix() == "/x/bettercompute/config.toml"
    assert config_path({"HOME": "/h", "BCCTL_CONFIG": "/b/c.toml"}).as_posix() == "/b/c.toml"


def test_the_file_is_private_and_keeps_what_was_there(environ: dict[str, str]) -> None:
    path = write_profile("dev", "http://dev:1", "bck_dev", environ=environ)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_profile("prod", "https://prod", "", environ=environ)
    content = load_profiles(path)
    assert content.current == "dev"
    assert content.profiles == {"dev": Profile("http://dev:1", "bck_dev"), "prod": Profile("https://prod", "")}
    write_profile("dev", "http://dev:2", "bck_new", environ=environ)
    assert load_profiles(path).profiles["dev"] == Profile("http://dev:2", "bck_new")


def test_a_profile_can_be_written_without_becoming_current(environ: dict[str, str]) -> None:
    path = write_profile("dev", "http://dev:1", "", make_current_if_unset=False, environ=environ)
    assert load_profiles(path).current == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('curent = "dev"', "Object contains unknown field `curent`"),
        ('[profiles.dev]\nurl = "http://x"\nkay = ""', "unknown field `kay` - at `$.profiles"),
        ("[profiles.dev]", "missing required field `url`"),
        ("current = ", "config.toml: "),
    ],
)
def test_a_bad_file_is_named(environ: dict[str, str], text: str, says: str) -> None:
    path = write_profile("dev", "http://dev:1", "", environ=environ)
    path.write_text(text)
    with pytest.raises(ProfileError) as refused:
        load_profiles(path)
    assert says in str(refused.value)
    # with both named outright the file is not needed
    assert resolve_connection(url="http://x", key="k", environ=environ).url.value == "http://x"


def test_a_file_that_others_can_read_is_refused(environ: dict[str, str]) -> None:
    path = write_profile("dev", "http://dev:1", "bck_dev", environ=environ)
    path.chmod(0o644)
    with pytest.raises(ProfileError, match=r"must be 0600; run: chmod 600"):
        resolve_connection(environ=environ)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:3000",
        "ftp://x",
        "http://",
        "http://x:0",
        "http://x:99999",
        "http://u:p@x",
        "http://x?y",
        "http://ü",
    ],
)
def test_what_is_not_a_url(environ: dict[str, str], url: str) -> None:
    with pytest.raises(ProfileError, match="is not the URL of a server"):
        write_profile("dev", url, "", environ=environ)


def test_a_bad_key_is_refused_without_being_repeated(environ: dict[str, str]) -> None:
    with pytest.raises(ProfileError, match="BCCTL_KEY: the key holds a space") as refused:
        resolve_connection(environ={**environ, "BCCTL_KEY": "bck_secret\nx"})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("name", ["", "a.b", "a b", '"', "x" * 65])
def test_what_cannot_name_a_profile(environ: dict[str, str], name: str) -> None:
    with pytest.raises(ProfileError, match="cannot name a profile"):
        write_profile(name, "http://x", "", environ=environ)


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_key_is_not_another_one(environ: dict[str, str], empty: str) -> None:
    write_profile("dev", "http://dev:1", "bck_dev.x", environ=environ)
    with pytest.raises(ProfileError, match=r"^BCCTL_KEY: is empty; give a key, or `unset BCCTL_KEY` to use"):
        resolve_connection(environ={**environ, "BCCTL_KEY": empty})
    with pytest.raises(ProfileError, match=r"^--key: is empty; give a key, or leave it out to use the profile's"):
        resolve_connection(key=empty, environ=environ)
    assert resolve_connection(key="bck_x.y", environ={**environ, "BCCTL_KEY": empty}).key is not None


# --- the command ---------------------------------------------------------------------------------


def test_profiles_are_set_used_and_removed(bcctl: CommandLine, tmp_path: Path) -> None:
    assert bcctl("profiles", "list").err.startswith("no profiles in ")
    assert bcctl("profiles", "set", "dev", "--url", "http://dev:1", "--key", "bck_0123456789abcdef.secret").status == 0
    assert bcctl("profiles", "set", "prod", "--url", "https://prod").status == 0
    listed = bcctl("profiles", "list")
    assert "secret" not in listed.out
    assert [line.split() for line in listed.out.splitlines()] == [
        ["PROFILE", "URL", "KEY", "CURRENT"],
        ["dev", "http://dev:1", "bck_01234567…", "yes"],
        ["prod", "https://prod", "-", "no"],
    ]
    assert bcctl("profiles", "use", "prod").err == "prod is current: https://prod\n"
    # a change of one keeps the other
    assert bcctl("profiles", "set", "dev", "--url", "http://dev:2").status == 0
    assert load_profiles(config_path()).profiles["dev"] == Profile("http://dev:2", "bck_0123456789abcdef.secret")
    assert bcctl("profiles", "remove", "prod").status == 0
    content = load_profiles(config_path())
    assert (content.current, list(content.profiles)) == ("", ["dev"])
    ran = bcctl("profiles", "use", "prod")
    assert (ran.status, ran.err) == (1, "NOT_FOUND: no profile prod; there are: dev\n")
    assert bcctl("profiles", "set", "new").status == 2


def test_a_key_is_read_from_stdin(bcctl: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("bck_x.y\n"))
    assert bcctl("profiles", "set", "dev", "--url", "http://dev:1", "--key", "-").status == 0
    assert load_profiles(config_path()).profiles["dev"].key == "bck_x.y"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "PROFILE: --key: the key is empty; give the whole key, bck_<id>.<secret>\n"),
        ("\n", "PROFILE: --key: the key is empty; give the whole key, bck_<id>.<secret>\n"),
        *(
            (bad, "PROFILE: --key: this is not an API key, which looks like bck_<id>.<secret>; copy it again\n")
            for bad in ("x", "key_x.y", "bck_x", "bck_x.", "bck_.y", "bck_x.y z")
        ),
    ],
)
@pytest.mark.parametrize("by", ["argument", "stdin"])
def test_what_is_no_key_leaves_the_saved_one(
    bcctl: CommandLine, monkeypatch: pytest.MonkeyPatch, given: str, says: str, by: str
) -> None:
    bcctl("profiles", "set", "dev", "--url", "http://dev:1", "--key", "bck_x.saved")
    monkeypatch.setattr("sys.stdin", io.StringIO(given))
    key = "-" if by == "stdin" else given.strip()
    ran = bcctl("profiles", "set", "dev", "--url", "http://dev:2", "--key", key)
    assert (ran.status, ran.err) == (1, says)
    assert load_profiles(config_path()).profiles["dev"] == Profile("http://dev:1", "bck_x.saved")
