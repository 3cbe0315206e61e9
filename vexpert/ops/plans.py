"""The plans of an engine: the packaged ones, a user's before them, or the same for every step."""

import torch

from vexpert.errors import ConfigError
from vexpert.log import get_logger, log_once
from vexpert.ops.dense_plan import dense_few_part, dense_linear_part, dense_lora_part
from vexpert.ops.moe_plan import base_plan, lora_plan
from vexpert.ops.plan_rows import PlanRows, packaged, read_rows

logger = get_logger(__name__)

PARTS = {
    ("moe", "base"): base_plan,
    ("moe", "lora"): lora_plan,
    ("dense", "few"): dense_few_part,
    ("dense", "linear"): dense_linear_part,
    ("dense", "lora"): dense_lora_part,
}


def load_plans(path: str | None, batch_invariant: bool) -> PlanRows:
    """Logged once, with its source. Raises ConfigError for a file that is not one of plans."""
    if path is not None and batch_invariant:
        raise ConfigError(
            f"kernel_plans={path!r}: batch_invariant has plans of its own; leave out one of them"
        )
    rows = packaged("invariant_" if batch_invariant else "")
    if path is not None:
        user = read_rows(path)
        check_rows(user)
        _compare_device(user)
        rows = user.before(rows)
    log_once(logger, f"kernel plans: {rows.source}")
    return rows


def check_rows(rows: PlanRows) -> None:
    """Build every row's plan once. Raises ConfigError for the first that is none."""
    for family, kinds in rows.families.items():
        for kind, those in kinds.items():
            part = PARTS[family, kind.split()[0]]
            for row in those:
                try:
                    part(row)
                except (TypeError, KeyError) as error:
                    raise ConfigError(
                        f"kernel_plans={rows.source!r}, {family}, {kind}: {error}; write the file"
                        " anew with vexpert bench tune"
                    ) from error


def _compare_device(rows: PlanRows) -> None:
    """Warn when the plans were tuned on another kind of GPU."""
    tuned = rows.about.get("device")
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if tuned is not None and here is not None and tuned != here:
        log_once(logger, f"kernel plans: {rows.source} was tuned on {tuned}, this is {here}")
