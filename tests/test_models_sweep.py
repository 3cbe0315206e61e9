"""Every MoE architecture of transformers is exact, or refused with a reason; so says the table."""

from pathlib import Path

import pytest
import transformers
from helpers_model_table import TABLE, make_table, moe_types, read_table, reason
from helpers_models import (
    Driver,
    random_sequences,
    served,
    tiny_config,
    tiny_model,
    worst_error,
)
from packaging.version import Version
from test_models_exact import DENSE, LIMIT, MOE
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from vexpert.config import EngineConfig
from vexpert.errors import ModelError
from vexpert.models.loader import load_model
from vexpert.models.support import EXACT, EXACT_DENSE, EXACT_MOE, REFUSED

INSTALLED = moe_types()
NOT_YET_SEEN = sorted((EXACT_MOE & set(CONFIG_MAPPING_NAMES)) - set(MOE))
DENSE_NOT_YET_SEEN = sorted((EXACT_DENSE & set(CONFIG_MAPPING_NAMES)) - set(DENSE))
# Those of the refused whose tiny models can be built; the others have sizes of their own rules.
ALSO_SEEN_BY_THE_PROBE = (
    "deepseek_v32",
    "doge",
    "glm_moe_dsa",
    "hy_v4",
    "jamba",
    "jetmoe",
    "kimi_linear",
    "minimax",
    "qwen3_next",
)


# Served from the version in which transformers runs their experts through ExpertsInterface.
SINCE = {"aria_text": Version("5.18")}


@pytest.mark.parametrize("model_type", NOT_YET_SEEN)
def test_exact_with_experts(model_type: str) -> None:
    model = tiny_model(model_type)
    if Version(transformers.__version__) < SINCE.get(model_type, Version("0")):
        with pytest.raises(ModelError, match="use a newer one"):
            served(model)
        return
    assert worst_error(model) < LIMIT
    assert any(hasattr(module, "vexpert_experts") for module in model.modules())


@pytest.mark.parametrize("model_type", DENSE_NOT_YET_SEEN)
def test_exact_dense(model_type: str) -> None:
    assert worst_error(tiny_model(model_type), longest=17) < LIMIT


@pytest.mark.parametrize("model_type", sorted(EXACT & set(CONFIG_MAPPING_NAMES) - set(SINCE)))
def test_loads_in_bfloat16(model_type: str, tmp_path: Path) -> None:
    """From the config alone: no dtype of the model's own clashes with that of the cache."""
    tiny_config(model_type).save_pretrained(tmp_path)
    options = {"device": "cpu", "dtype": "bfloat16", "load_format": "dummy"}
    driver = Driver(load_model(EngineConfig(model=str(tmp_path), **options)))
    assert all(rows.isfinite().all() for rows in driver.play(random_sequences(3, 9, 1)))


@pytest.mark.parametrize("model_type", INSTALLED)
def test_refused_or_verified(model_type: str) -> None:
    if reason(model_type) is None:
        assert model_type in EXACT_MOE or f"{model_type}_text" in EXACT_MOE


@pytest.mark.parametrize("model_type", ALSO_SEEN_BY_THE_PROBE)
def test_the_probe_refuses_too(model_type: str) -> None:
    """The refusal by name is not the only guard: the observed pass finds the cause as well."""
    assert model_type in REFUSED
    model = tiny_model(model_type)
    with pytest.raises(ModelError):
        served(model)


def test_table_is_up_to_date() -> None:
    text = TABLE.read_text()
    if f"transformers {transformers.__version__} " in text:
        assert text == make_table(), "run: python scripts/make_model_table.py"
    table = read_table(text)
    assert len(table) > 50
    for model_type in set(INSTALLED) & set(table):
        why = reason(model_type)
        assert table[model_type] == ("refused" if why else "exact", why or "")
