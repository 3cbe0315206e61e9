"""bench/on_gpu.py: parts begin, end in time and are told apart, and name what exists."""

import importlib.util
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
HANG = "import time; print('began', flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + HANG
# A child that outlives its parent's interrupt, and holds the pipe that it is given.
PARENT = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]).wait()"


@pytest.fixture(scope="module")
def on_gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("on_gpu", ROOT / "bench/on_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["on_gpu"] = module  # where its dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_how_parts_end(on_gpu: ModuleType, tmp_path: Path) -> None:
    mark = tmp_path / "compiled"
    chosen = {
        "good": on_gpu.Part(60, python(f"print(open({str(mark)!r}).read())"),
                            [python(f"open({str(mark)!r}, 'w').write('first')")]),
        "bad": on_gpu.Part(60, python("raise SystemExit(3)")),
        "slow": on_gpu.Part(2, python(HANG)),
    }  # fmt: skip
    ends = {end.name: end.how for end in on_gpu.run_parts(chosen, 300.0, tmp_path)}
    assert ends == {"good": "0", "bad": "3", "slow": "out of time"}
    assert on_gpu.last_lines(tmp_path / "good.log")[-1] == "first"
    assert "began" in (tmp_path / "slow.log").read_text()
    assert "KeyboardInterrupt" in (tmp_path / "slow.log").read_text()


def test_no_part_begins_without_time(on_gpu: ModuleType, tmp_path: Path) -> None:
    chosen = {"late": on_gpu.Part(60, python("print(1)"))}
    (end,) = on_gpu.run_parts(chosen, on_gpu.GRACE, tmp_path)
    assert end.how == "not begun"
    assert not list(tmp_path.iterdir())


def test_who_is_deaf_to_an_interrupt_is_killed_with_its_children(
    on_gpu: ModuleType, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        process = on_gpu.begin(python(PARENT, DEAF), file)
        while "began" not in log.read_text():
            assert process.poll() is None
            time.sleep(0.01)
        assert on_gpu.finish(process, 0.0, grace=0.5) in ("killed", "out of time")
    with pytest.raises(ProcessLookupError):
        on_gpu.os.killpg(process.pid, 0)


def test_what_cannot_be_compiled_is_told(on_gpu: ModuleType, tmp_path: Path) -> None:
    part = on_gpu.Part(60, python("print('went on')"), [python("raise SystemExit(5)")])
    (end,) = on_gpu.run_parts({"part": part}, 300.0, tmp_path)
    assert end.how == "0"
    assert "compiling: 5" in (tmp_path / "part.log").read_text()


def test_files_of_gpu_tests(on_gpu: ModuleType) -> None:
    files = on_gpu.gpu_tests()
    assert "tests/test_ops_gpu.py" in files
    assert "tests/test_readme.py" not in files
    assert not any("test_server" in file for file in files)


def test_commands_exist(on_gpu: ModuleType) -> None:
    """Every option that a part names is one of its command's."""
    commands = {}
    for part in on_gpu.parts().values():
        for command in (part.command, *part.compile):
            words = [word for word in command if word != sys.executable]
            if words[0].startswith("bench/"):
                commands.setdefault((words[0],), set()).update(words[1:])
            elif words[:2] == ["-m", "vexpert"]:
                commands.setdefault(tuple(words[:4]), set()).update(words[4:])
    assert len(commands) > 5
    for command, words in commands.items():
        said = subprocess.run(
            [sys.executable, *command, "--help"], cwd=ROOT, env=on_gpu.environment(),
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        missing = {word for word in words if word.startswith("--") and word not in said}
        assert not missing, (command, missing)


def test_the_list_and_the_last_line(on_gpu: ModuleType, tmp_path: Path) -> None:
    run = [sys.executable, "bench/on_gpu.py"]
    said = subprocess.run([*run, "--list"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.split()[0] for line in said.stdout.splitlines()} == set(on_gpu.parts())
    options = ["tests", "--output", str(tmp_path), "--tests", "tests/test_layering.py -k none"]
    said = subprocess.run([*run, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.returncode == 1  # pytest: no tests
    assert json.loads(said.stdout.splitlines()[-1])["ends"] == {"tests": "5"}
    assert (
        shlex.join(["tests/test_layering.py", "-k", "none"]) in (tmp_path / "tests.log").read_text()
    )
