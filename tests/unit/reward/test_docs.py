"""docs/rewards.md says what is so: its settings load, its figures are those of the code."""

import re
from pathlib import Path

from a3po_megatron.config.load import load_config
from a3po_megatron.config.reward import RewardPoolConfig
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.reward import extract, huge
from a3po_megatron.reward.build import check_reward
from tests.references.answer_pairs import MATCH, MISMATCH

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_the_settings_on_the_page_load_and_pass(tmp_path: Path) -> None:
    (settings,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "config.yaml").write_text(settings)
    config = load_config(TrainConfig, tmp_path / "config.yaml")
    check_reward(config.reward, "gsm8k", config.rollout.max_response_tokens)
    assert config.reward.kind == "math"
    assert config.reward.pool == RewardPoolConfig()


def test_every_convention_and_bound_on_the_page_is_that_of_the_code() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(extract.CONVENTIONS)
    for figure in (f"last {extract.WINDOW} characters", f"above {extract.MAX_ANSWER} characters"):
        assert figure in PAGE
    assert f"deeper than {extract.MAX_NESTING}" in PAGE
    assert f"more than {huge.MAX_DIGITS:,} digits" in PAGE
    assert f"{len(MATCH) + len(MISMATCH)} of {len(MATCH) + len(MISMATCH)}" in PAGE


def test_every_file_that_the_page_names_is_there() -> None:
    for path in re.findall(r"\b(?:tools|tests)/[\w/]+\.py", PAGE):
        assert (ROOT / path).is_file(), path
