"""What libraries say comes as lines of the command's own log."""

import json
import subprocess
import sys

SCRIPT = """
from vexpert.log import adopt_libraries, set_up_logging
from transformers.utils.logging import get_logger
set_up_logging("vexpert", "INFO", "json")
adopt_libraries()
adopt_libraries()
get_logger("transformers.tokenization_utils_base").warning("Token indices")
"""


def test_a_message_of_transformers_is_one_line_of_json() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    (line,) = done.stderr.splitlines()
    fields = json.loads(line)
    assert fields["message"].endswith("Token indices")
    assert (fields["level"], fields["logger"].split(".")[0]) == ("warning", "transformers")
