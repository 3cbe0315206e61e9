"""docs/api.md and docs/operations.md: every example runs, every field and option is told."""

import argparse
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from vexpert.cli import serve_options
from vexpert.cli.main import build_parser
from vexpert.server.protocol.chat import ChatCompletionRequest
from vexpert.server.protocol.completion import CompletionRequest

pytest_plugins = ["helpers_demo_server"]
DOCS = Path(__file__).parent.parent / "docs"
API, OPERATIONS = ((DOCS / name).read_text() for name in ("api.md", "operations.md"))


def test_every_example_runs(url: str) -> None:  # the demo with no option, as the page says
    pytest.importorskip("xgrammar")
    blocks = re.findall(r"```python\n(.*?)```", API, re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace("http://127.0.0.1:8000", url), names)
    addresses = re.findall(r"^\$ curl .*?(http://\S+)$", OPERATIONS, re.MULTILINE)
    assert addresses
    for address in addresses:
        found = httpx.get(address.replace("http://127.0.0.1:8000", url), timeout=60)
        assert found.status_code == 200
    names["client"].close()


@pytest.mark.parametrize("body", [ChatCompletionRequest, CompletionRequest])
def test_every_field_is_told(body: Any) -> None:
    told = set(re.findall(r"`([A-Za-z_]+)`", API))
    assert set(body.model_fields) <= told


def test_the_configuration_file_is_read(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", OPERATIONS, re.DOTALL)
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    args = build_parser().parse_args(["serve", "--config", str(file)])
    assert (args.model, args.max_loras, args.enable_prefix_caching) == ("path/to/model", 32, False)
    assert [module.name for module in args.lora_modules] == ["billing", "legal"]


def test_every_option_of_the_server_is_told() -> None:
    parser = argparse.ArgumentParser()
    serve_options.add_server_options(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    told = set(re.findall(r"`(--[a-z-]+)", OPERATIONS))
    assert flags - {"-h", "--help"} <= told
