"""The bars of the long run: what counts as growth, and as the same image."""

import pytest
import torch
from safetensors.torch import save_file

from studies import long_run

ROUND = len(long_run.SEEDS) * len(long_run.KINDS)


def test_filling_caches_is_no_growth_and_a_leak_is():
    filled = [float(number) for number in range(ROUND)] + [100.0] * 3 * ROUND
    assert long_run.growth(filled) == 0
    leaking = [value + 0.5 * number for number, value in enumerate(filled)]
    assert long_run.growth(leaking) == 0.5 * 2 * ROUND


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Stands in for a server: each result is a file with the number of results so far, halved."""
    monkeypatch.setattr(long_run, "memory", lambda server: (1.0, None))

    class Server:
        written = 0

        def queue(self, prompt):
            return {node: node for node, entry in prompt.items() if entry["class_type"] == "SaveLatent"}

        def saved_path(self, result, kind):
            path = tmp_path / f"{self.written}.latent"
            save_file({"latent_tensor": torch.tensor([self.written // 100])}, path)
            self.written += 1
            return path

        def clear_history(self):
            pass

    return Server()


def test_an_image_that_changes_is_seen(server):
    models = long_run.Models(long_run.workflows.int8_model, "a", "b")
    samples, hashes = long_run.run(server, models, 2 * ROUND)
    assert len(samples) == 2 * ROUND
    assert all(len(found) == 1 for found in hashes.values())  # fewer than 100 files were written
    _, hashes = long_run.run(server, models, 2 * ROUND)
    assert any(len(found) == 2 for found in hashes.values())
