"""Installs on Windows the Triton that goes with PyTorch; PyTorch brings none there. Where one is, it is left alone.

ComfyUI Manager runs this file, with ComfyUI's Python, after it has installed the requirements. pip could not choose: a
requirement may depend on the system, but not on the version of another package.
"""

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path


def main() -> None:
    if sys.platform != "win32" or importlib.util.find_spec("triton") or not importlib.util.find_spec("torch"):
        return
    import torch

    if torch.version.cuda is None:
        return
    release = Path(__file__).with_name("kernels") / "card" / "triton_release.py"
    requirement = runpy.run_path(str(release))["triton_requirement"]()
    installer = ["pip"] if importlib.util.find_spec("pip") else ["uv", "pip"]
    done = subprocess.run([sys.executable, "-m", *installer, "install", requirement], check=False)
    if done.returncode:
        print(f"INT8 DiT: {requirement} could not be installed. Without it INT8 layers compute in bf16.", flush=True)


if __name__ == "__main__":
    main()
