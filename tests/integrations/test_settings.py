"""Extra configurations of engines: what is taken, what is refused and how."""

from __future__ import annotations

import sys

import pytest

from support import new_option
from tensorlift.errors import OptionError
from tensorlift.integrations import settings


def test_every_field_is_forwarded_without_a_list_of_its_own(monkeypatch):
    with pytest.raises(OptionError, match="unknown setting 'brand_new'"):
        settings.parse({"brand_new": 3}, "engine")
    new_option.added(monkeypatch)
    assert settings.parse({"brand_new": "3"}, "engine").resolved().brand_new == 3


def test_explicit_values_win_over_the_environment_and_null_does_not(monkeypatch):
    monkeypatch.setenv("TENSORLIFT_BACKEND", "AIO")
    monkeypatch.setenv("TENSORLIFT_IO_DEPTH", "7")
    found = settings.parse({"backend": "MMAP", "io_depth": None}, "engine").resolved()
    assert found.backend == ("MMAP",)
    assert found.io_depth == 7


@pytest.mark.parametrize(
    ("key", "says"),
    [
        *(
            (key, "is set by the engine")
            for key in ("filename", "framework", "device", "process_group", "copy")
        ),
        ("enable_multithread_load", "belongs to the engine's own loaders"),
        ("num_threads", "the setting is called threads"),
        ("chunksize", "did you mean chunk_size"),
        ("zzz", "the known ones are arena_size"),
    ],
)
def test_what_is_refused_is_named(key, says):
    with pytest.raises(OptionError, match=says) as caught:
        settings.parse({key: None}, "vLLM")
    assert repr(key) in str(caught.value)
    assert "vLLM" in str(caught.value)


@pytest.mark.parametrize(
    "extra",
    [3, ["backend"], "[1]", "{", {1: 2}, '{"a":' * 100_000, ["x" * 100_000], {"strict": "x" * 100_000}],
)
def test_what_is_no_object_is_refused(extra):
    with pytest.raises(OptionError, match="extra configuration") as caught:
        settings.parse(extra, "vLLM")
    assert len(str(caught.value)) < 500


def test_a_setting_that_comes_twice_is_refused():
    with pytest.raises(OptionError, match="'strict' comes twice"):
        settings.parse('{"strict": false, "backend": "MMAP", "strict": true}', "SGLang")


def test_values_are_checked_where_the_configuration_is_made(monkeypatch):
    with pytest.raises(OptionError, match="chunk_size is 5"):
        settings.parse({"chunk_size": 5}, "vLLM")
    with pytest.raises(OptionError, match="strict is 'no'"):
        settings.parse({"strict": "no"}, "vLLM")
    monkeypatch.setenv("TENSORLIFT_CHUNK_SIZE", "5")
    with pytest.raises(OptionError, match="TENSORLIFT_CHUNK_SIZE is '5'"):
        settings.parse(None, "vLLM")


def test_json_text_and_nothing_are_taken():
    assert settings.parse('{"backend": "MMAP", "strict": false}', "x") == settings.Settings(
        {"backend": "MMAP"}, False
    )
    assert settings.parse(None, "x") == settings.parse({"strict": None}, "x") == settings.Settings()


def test_no_torch_is_needed_to_check_arguments():
    import subprocess

    code = "import sys, tensorlift.integrations.settings, tensorlift.integrations.vllm as v; v.register();"
    code += "assert 'torch' not in sys.modules and 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
