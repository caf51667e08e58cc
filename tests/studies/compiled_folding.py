"""Of small compiled models: which quantizers Inductor folds into the kernel that computes their input.

    python tests/studies/compiled_folding.py --comfyui PATH [--out DIR]

Needs no GPU: the graphs are scheduled for a fake H200, as tests/support/inductor_kernels.py does.
"""

import argparse
import datetime
import platform
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from support.architectures import ARCHITECTURES
from support.pack import import_comfyui, import_pack

RESULTS = Path(__file__).resolve().parent / "results"
# Titles of the table, and the small models. Wan 2.2's 14 B models are built as 2.1's.
MODELS = {
    "Ideogram 4": "Ideogram 4",
    "Z-Image": "Z-Image",
    "Lumina 2": "Lumina 2",
    "Flux.1": "Flux",
    "Flux.2": "Flux 2",
    "Qwen-Image": "Qwen-Image",
    "Wan 2.2": "Wan t2v",
    "SD3.5": "SD3",
    "HunyuanVideo": "Hunyuan Video",
    "Krea 2": "Krea 2",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for compiled_folding.md")
    arguments = parser.parse_args()
    import_comfyui(arguments.comfyui, cpu=True)
    import_pack()
    from comfyui_version import __version__ as comfyui_version

    from int8_dit.kernels.benchmark import markdown
    from support.inductor_kernels import quantizers_of

    rows = []
    for title, name in MODELS.items():
        quantizers, error = quantizers_of(ARCHITECTURES[name])
        sources = (quantizers.total[kind] for kind in ("attention", "product", "graph input"))
        folded = f"{quantizers.folded} of {quantizers.total['producer']}"
        rows.append([title, folded, *map(str, sources), str(quantizers.graphs), f"{error:.0e}"])
        print(rows[-1], dict(quantizers.apart), flush=True)
    header = ["model", "folded", "fed by attention", "fed by a product", "fed by a graph input", "graphs", "error"]
    text = f"""# Quantizers that Inductor folds into their producers

Small random models with every linear in INT8, compiled whole, scheduled for a fake H200 on a
CPU. "Folded" are quantizers in one kernel with what computes their input. Attention and products of linears are no
kernels of Inductor's: what only they feed has nothing to be folded into. The error is that of the compiled graph, run
on the CPU, to eager.

PyTorch {torch.__version__}, ComfyUI {comfyui_version}, {platform.system()} {platform.machine()}, \
{datetime.date.today()}: `python tests/studies/compiled_folding.py --comfyui PATH`

{markdown(header, rows)}
"""
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "compiled_folding.md").write_text(text)


if __name__ == "__main__":
    main()
