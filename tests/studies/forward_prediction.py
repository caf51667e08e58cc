"""What Kernel Benchmark predicts for a full Ideogram 4 beside what its forward takes with the fused kernel.

    python tests/studies/forward_prediction.py --comfyui PATH [--out DIR]

Needs an NVIDIA card with about 60 GB of memory; `--blocks 1 --pixels 64` tries the script out on a CPU. One forward is
the conditional one with 256 text tokens. The prediction knows nothing of the measured INT8 forwards: it is made of one
forward in bf16 and of the linears timed one by one.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from support.pack import import_comfyui, import_pack

RESULTS = Path(__file__).resolve().parent / "results"
TITLES = {"bf16": "bf16", "unfused": "this pack, blocks unfused", "pack": "this pack"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=34)
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for forward_prediction.md")
    arguments = parser.parse_args()
    import_comfyui(arguments.comfyui, cpu=not torch.cuda.is_available())
    import_pack()
    import comfy.model_management
    from comfyui_version import __version__ as comfyui_version

    from int8_dit.kernels.benchmark import describe_machine, markdown, shown_methods, title
    from int8_dit.nodes.benchmark.forward import measure_forward
    from int8_dit.nodes.benchmark.run import KEEP, run, text_of
    from support.random_models import FAMILIES, RandomModel, unfused, weights_on_device

    device = comfy.model_management.get_torch_device()
    random = RandomModel(FAMILIES["Ideogram 4"], device, {"num_layers": arguments.blocks})
    inputs = random.inputs(arguments.pixels)
    latent = {"samples": torch.zeros(tuple(inputs["x"].shape))}
    positive = [[inputs["c_crossattn"].cpu(), {}]]
    with weights_on_device():
        model = random.bf16_model()
        outcome = run(model, 1, ["native_int8"], positive, latent, KEEP)
        comfy.model_management.unload_all_models()
        by_linears = outcome.split.predicted(outcome.report.shapes, "fused int8")
        by_blocks = outcome.split.predicted_blocks()
        measured = {}
        builders = {
            "bf16": random.bf16_model,
            "unfused": lambda: unfused(random.int8_model()),
            "pack": random.int8_model,
        }
        for name, build in builders.items():
            patcher = build()
            totals = [measure_forward(patcher, positive, latent, lambda: None).total for _ in range(arguments.rounds)]
            measured[name] = statistics.median(totals)
            del patcher
            comfy.model_management.unload_all_models()
    predicted = {"bf16": outcome.split.total, "unfused": by_linears, "pack": by_blocks}
    told = {"bf16": "the node's own forward", "unfused": "from the linears", "pack": "from the blocks"}
    rows = [
        [
            TITLES[name],
            f"{measured[name]:.1f}",
            f"{predicted[name]:.1f} ({told[name]})",
            f"{predicted[name] / measured[name] - 1:+.1%}",
        ]
        for name in TITLES
    ]
    parts = [
        f"# Kernel Benchmark's prediction\n\n{title(describe_machine(device))}, ComfyUI {comfyui_version}, "
        f"{arguments.blocks} blocks with random weights, {arguments.pixels} px, 256 text tokens, one forward.",
        markdown(["one forward", "measured, ms", "Kernel Benchmark on the bf16 model, ms", "off by"], rows),
        "What the node shows:",
        text_of(outcome.sections(shown_methods(["native_int8"]), None)),
    ]
    (arguments.out / "forward_prediction.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print("\n\n".join(parts))


if __name__ == "__main__":
    main()
