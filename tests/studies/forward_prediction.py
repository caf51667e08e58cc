"""What Kernel Benchmark predicts for a full Ideogram 4 beside what its forward takes with the fused kernel.

    python tests/studies/forward_prediction.py --comfyui PATH [--out DIR]

Needs an NVIDIA card with about 60 GB of memory; `--blocks 1 --pixels 64` tries the script out on a CPU. One forward is
the conditional one with 256 text tokens. The prediction knows nothing of the measured INT8 forwards: it is made of one
forward in bf16 and of the linears timed one by one.
"""

import statistics
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from studies.frame import RESULTS, Study


def main() -> None:
    study = Study(__doc__, "forward_prediction", RESULTS)
    study.option("--blocks", type=int, default=34)
    study.option("--pixels", type=int, default=1024)
    study.option("--rounds", type=int, default=3)
    arguments = study.start()
    import comfy.model_management

    from int8_dit.kernels.benchmark import markdown, text_of
    from int8_dit.nodes.benchmark.forward import measure_forward
    from int8_dit.nodes.benchmark.run import KEEP, run
    from studies.variants import VARIANTS
    from support.random_models import FAMILIES, RandomModel, weights_on_device

    random = RandomModel(FAMILIES["Ideogram 4"], study.device, {"num_layers": arguments.blocks})
    inputs = random.inputs(arguments.pixels)
    latent = {"samples": torch.zeros(tuple(inputs["x"].shape))}
    positive = [[inputs["c_crossattn"].cpu(), {}]]
    with weights_on_device():
        model = random.bf16_model()
        outcome = run(model, 1, ["native_int8"], positive, latent, KEEP)
        comfy.model_management.unload_all_models()
        split = outcome.split
        predicted = {
            "bf16": (split.total, "the node's own forward"),
            "unfused": (split.predicted(outcome.linears, "fused int8"), "from the linears"),
            "pack": (split.predicted_blocks(), "from the blocks"),
        }
        rows = []
        for name, (expected, source) in predicted.items():
            patcher = VARIANTS[name].build(random)
            totals = [measure_forward(patcher, positive, latent).total for _ in range(arguments.rounds)]
            found = statistics.median(totals)
            del patcher
            comfy.model_management.unload_all_models()
            title = VARIANTS[name].title
            rows.append([title, f"{found:.1f}", f"{expected:.1f} ({source})", f"{expected / found - 1:+.1%}"])
    study.write(
        f", {arguments.blocks} blocks with random weights, {arguments.pixels} px, 256 text tokens, one forward.",
        markdown(["one forward", "measured, ms", "Kernel Benchmark on the bf16 model, ms", "off by"], rows),
        "What the node shows:",
        text_of(outcome.sections(None)),
        rows=rows,
    )


if __name__ == "__main__":
    main()
