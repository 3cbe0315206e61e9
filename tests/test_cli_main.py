"""Commands, options made from EngineConfig, one-line errors, and a quick start."""

import argparse
import dataclasses
import os
import subprocess
import sys

import pytest

from vexpert import __version__
from vexpert.cli.main import COMMANDS, build_parser, main
from vexpert.cli.parser import engine_config
from vexpert.cli.serve import lora_module
from vexpert.cli.serve_options import server_options
from vexpert.cli.threads import limit_spinning
from vexpert.config import EngineConfig
from vexpert.server.interface import LoraModule
from vexpert.server.options import TOOL_FORMATS, ServerOptions
from vexpert.server.tools.formats import FORMATS

SPINNING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def parse(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(words)


def test_every_engine_option_has_a_flag() -> None:
    assert engine_config(parse("serve")) == EngineConfig()
    args = parse(
        "serve", "folder", "--dtype", "bfloat16", "--max-model-len", "128", "--no-enable-lora",
        "--gpu-memory-utilization", "0.5", "--max-loras", "3", "--no-lora-use-virtual-experts",
        "--kv-cache-memory", "1000000", "--enforce-eager", "--lora-backend", "torch",
    )  # fmt: skip
    assert engine_config(args) == EngineConfig(
        model="folder",
        dtype="bfloat16",
        max_model_len=128,
        enable_lora=False,
        gpu_memory_utilization=0.5,
        max_loras=3,
        lora_use_virtual_experts=False,
        kv_cache_memory=1_000_000,
        enforce_eager=True,
        lora_backend="torch",
    )


def test_every_option_of_the_server_is_its_field() -> None:
    assert server_options(parse("serve")) == ServerOptions()
    assert set(TOOL_FORMATS) == set(FORMATS)
    args = parse(
        "serve", "--served-model-name", "a", "b", "--no-web", "--api-key", "k",
        "--api-key-file", "f", "--allowed-adapter-roots", "x", "y", "--allowed-origins", "*",
        "--allowed-methods", "GET", "--allowed-headers", "X-A", "--allow-credentials",
        "--max-body-bytes", "5",
        "--max-queue-len", "6", "--max-connections", "11",
        "--request-timeout", "7", "--write-timeout", "8",
        "--engine-step-timeout", "0", "--shutdown-timeout", "9", "--engine-restarts", "10",
        "--tool-call-parser", "hermes", "--disable-uvicorn-access-log", "--disable-log-stats",
        "--otlp-traces-endpoint", "http://x",
    )  # fmt: skip
    assert engine_config(args) == EngineConfig(allowed_adapter_roots=("x", "y"))
    options = server_options(args)
    assert options == ServerOptions(
        served_model_names=("a", "b"),
        web=False,
        api_keys=("k",),
        api_key_file="f",
        allowed_adapter_roots=("x", "y"),
        allowed_origins=("*",),
        allowed_methods=("GET",),
        allowed_headers=("X-A",),
        allow_credentials=True,
        max_body_bytes=5,
        max_queue_len=6,
        max_connections=11,
        request_timeout=7.0,
        write_timeout=8.0,
        engine_step_timeout=0.0,
        shutdown_timeout=9.0,
        engine_restarts=10,
        tool_call_parser="hermes",
        access_log=False,
        status_interval=None,
        otlp_traces_endpoint="http://x",
    )
    for spec in dataclasses.fields(ServerOptions):  # none was forgotten above
        if spec.metadata.get("group"):
            assert getattr(options, spec.name) != spec.default, spec.name
    assert (options.time_limit, options.step_timeout) == (7.0, float("inf"))
    assert ServerOptions().time_limit is None


@pytest.mark.parametrize("command", ["serve", "bench throughput"])
def test_help_shows_every_option_in_its_group(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for spec in dataclasses.fields(EngineConfig):
        if spec.name == "reserved_names":  # those of --served-model-name
            continue
        if spec.name != "model" and (command == "serve" or spec.metadata["group"]):
            assert "--" + spec.name.replace("_", "-") in text
    assert all(title in text for title in ("KV cache:", "scheduler:", "adapters:"))


def test_lora_modules_in_both_forms() -> None:
    args = parse(
        "serve", "--lora-modules", "a=x/y", 'b=p=q', "--lora-modules",
        '{"name": "c", "path": "z", "lora_B_layout": "interleaved"}',
    )  # fmt: skip
    assert args.lora_modules == [
        LoraModule("a", "x/y"),
        LoraModule("b", "p=q"),
        LoraModule("c", "z", "interleaved"),
    ]


@pytest.mark.parametrize("text", ["", "name", "=path", "name=", "{", '{"name": "x"}', '{"a": 1}'])
def test_a_bad_lora_module(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        lora_module(text)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["serve", "--max-loras", "0"], "max_loras=0"),
        (["serve", "--max-loras", "many"], "invalid int value"),
        (["serve", "--dtype", "int3"], "int3"),
        (["serve", "--max-lora", "3"], "did you mean --max-loras?"),
        (["serve", "--prot", "1"], "did you mean --port?; see vexpert serve --help"),
        (["chat", "--port", "8123"], "--port 8123; did you mean --url?; see vexpert chat --help"),
        (["bench", "serve", "--port=8123"], "did you mean --url?; see vexpert bench serve --help"),
        (["collect-env", "--port"], "arguments: --port; see vexpert collect-env --help"),
        (["--fly", "collect-env"], "arguments: --fly; see vexpert --help"),
        (["serve", "--ssl-keyfile", "x"], "arguments: --ssl-keyfile; docs/migrating.md says"),
        (["chat", "--quantization", "x"], "arguments: --quantization x; see vexpert chat --help"),
        (["sevre"], "did you mean serve?; see vexpert --help"),
        (["serve", "--dtype", "float31"], "did you mean float32?"),
        (["serve", "--tensor-parallel-size", "2"], "tensor_parallel_size=2"),
        (["serve", "--lora-modules", "x"], "NAME=PATH"),
        (["serve", "--lora-modules", '{"name": "x"}'], "the field 'path' is missing"),
        (["serve", "--lora-modules", '{"name": "x", "pth": "y"}'], "no field 'pth'; known: name"),
        (["serve", "--lora-modules", '{"name": "x", "pinned": 1}'], "pinned=1: use true or false"),
        (["serve", "--port", "70000"], "port=70000"),
        (["serve", "--max-body-bytes", "0"], "max_body_bytes=0"),
        (["serve", "--gpu-memory-utilization", "3"], "gpu_memory_utilization=3.0"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "required"),
        (["bench", "serve", "--num-prompts", "0"], "num_prompts=0"),
        (["chat", "--url", "http://127.0.0.1:9", "--once", "x"], "vexpert serve"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words)
    except SystemExit as ending:
        code = int(str(ending.code))
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert told in shown.err


def test_a_plain_installation_is_told_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "vexpert.cli.client", raising=False)
    monkeypatch.setitem(sys.modules, "httpx", None)  # as where it is not installed
    assert main(["chat", "--once", "x"]) == 2
    assert capsys.readouterr().err == "error: httpx is missing; pip install 'vexpert[serve]'\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"vexpert {__version__}\n"


def test_parsing_imports_nothing_heavy() -> None:
    code = (
        "import sys; from vexpert.cli.main import build_parser; build_parser()\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'pydantic', 'httpx', 'rich', 'uvicorn'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_collect_env_names_what_is_there_and_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vexpert.cli.collect_env.PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it cannot be imported
    assert main(["collect-env"]) == 0
    facts = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert facts["vexpert"] == __version__
    assert facts["no-such-package"] == "not installed"
    assert facts["gpu"].startswith("unknown")
    assert facts["torch"][0].isdigit()
    assert facts["memory"].endswith("GiB")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, "20000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_threads_sleep_soon_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], kept: str | None
) -> None:
    monkeypatch.setattr(os, "environ", given)
    limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == kept


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--host", "no.such.host.invalid"],
        ["bench", "throughput", "/no/such/model", "--device", "cpu"],
        ["bench", "kernel", "--device", "abacus"],
        ["adapter", "check", "/no/such/adapter", "--model", "/no/such/model"],
    ],
)
def test_spinning_is_limited_before_torch_is_imported(words: list[str]) -> None:
    code = (
        "import importlib.abc, os, sys; VARIABLE = 'GOMP_SPINCOUNT'\n"
        "class Watch(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch': sys.exit(f'limit {os.environ.get(VARIABLE)}')\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from vexpert.cli.main import main\n"
        f"main({words})\n"
        "import torch"  # where the command itself ends before it
    )
    environment = {k: v for k, v in os.environ.items() if k not in SPINNING}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stderr.splitlines()[-1] == "limit 20000"


def test_every_command_runs_from_its_module() -> None:
    assert set(COMMANDS) == {"serve", "chat", "bench", "adapter", "collect-env", "completion"}
    for name in ("serve", "chat", "collect-env"):
        assert parse(name).module == COMMANDS[name][0]
