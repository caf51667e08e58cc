"""The ablation command, small: it runs, its figures are figures, and its default is that of the node."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

STUDIES = Path(__file__).resolve().parent


def test_the_command_leaves_data_tables_and_a_picture(comfyui, tmp_path):
    command = [sys.executable, str(STUDIES / "ablation.py"), "--comfyui", str(comfyui), "--out", str(tmp_path)]
    names = ["FP8", "FP8 scaled", "ComfyUI ConvRot INT8", "naive W8A8", "recipe"]
    subprocess.run([*command, "--subjects", "outliers", "--pairs", "6", "--variants", *names], check=True)
    results = json.loads((tmp_path / "ablation.json").read_text())["subjects"]["outliers"]
    figures = results["figures"]
    assert list(figures) == ["bf16", *names]
    assert len(results["errors"]["recipe"]) == len(results["read"]["recipe"]) == 6
    assert figures["recipe"]["protected"] == 3 and figures["naive W8A8"]["protected"] == 0
    for name, figure in figures.items():
        middle, low, high = figure["error"]
        assert low <= middle <= high
        assert middle == pytest.approx(np.mean(results["errors"][name]), rel=1e-3)
    # So much more than chance that six images are enough.
    ratios = [figures["recipe"][f"ratio to {name}"][2] for name in ("naive W8A8", "FP8", "ComfyUI ConvRot INT8")]
    assert ratios[0] < 0.5 and max(ratios) < 1
    table = (tmp_path / "ablation.md").read_text()
    assert all(f"| {name} |" in table for name in names)
    assert (tmp_path / "glyphs.png").stat().st_size > 1000


def test_the_default_is_the_nodes_own(pack):
    from int8_dit.nodes.quantization.quantize import QuantizationSettings
    from int8_dit.nodes.quantize_to_int8 import QuantizeToINT8SmoothQuant, _protection
    from studies import ablation

    widgets = {entry.id: entry for entry in QuantizeToINT8SmoothQuant.define_schema().inputs}
    first = widgets["protect"].options[0]
    settings = QuantizationSettings(**ablation.pack_variants(34)[ablation.DEFAULT])
    assert settings.protection == _protection({"protect": first.key, "percent": first.inputs[0].default})
    for name in ("method", "alpha", "search_alpha", "smooth_only_foldable", "protected_in", "rounding"):
        assert getattr(settings, name) == widgets[name].default, name
    assert settings.clip == (widgets["weight_scales"].default != "absmax")
