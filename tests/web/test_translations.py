"""Sentences of runs in the user's language, in the real frontend."""

import re

import pytest

from support import workflows
from support.frontend import add_nodes, open_details, open_frontend, run
from support.raised_sentences import raised_sentences

SENTENCES = (  # what nodes say in English, cut and put together in every way
    "fused INT8: 204 of 211",
    "204 of 211 linears fused INT8, 7 bf16 (protected), attention as ComfyUI",
    "0 of 34 linears fp32 (the model runs on cpu, and INT8 tensor cores need a GPU), attention as ComfyUI",
    "210 of 211 linears fused INT8 from GGUF Q4_K, 1 bf16 (small or sensitive), attention as ComfyUI, weights of both "
    "models as stored in 10.4 GB (INT8 takes 18.6 GB, the card has 11.7 GB free)",
    "34 of 34 linears fused INT8, attention as ComfyUI, weights as INT8 in 9.3 GB (as stored 5.2 GB)",
    "204 of 211 linears fused INT8, 3 INT8 from GGUF Q4_K with 16-bit activations in plain PyTorch (no GPU), 2 INT8 "
    "in memory but computed in bf16, 1 INT8 in memory but computed in fp16 (bf16 was chosen), 1 fp32 (bf16 was chosen)",
    "204 of 211 linears INT8 from W4A8 with 16-bit activations in plain PyTorch (no GPU), 7 bf16 (protected), "
    "attention as ComfyUI",
    "204 of 211 linears fused INT8, 5 ComfyUI's INT8 (measured to be the fastest on this RTX 3060, 2026-11-28), 2 bf16 "
    "(the model runs on cpu, and INT8 tensor cores need a GPU), attention the fastest exact way",
    "34 of 34 linears fp32 (small or sensitive), attention as ComfyUI, exact in 3 blocks",
    "34 of 36 linears bf16 instead of the file's INT8, 2 fp16 (bf16 was chosen), attention as ComfyUI",
    "34 of 36 linears bf16 instead of the file's INT8 (bf16 was chosen), 2 bf16 (small or sensitive)",
    "34 of 36 linears FP8 as in the file, 2 ComfyUI's W4A4 as in the file (slow: comfy-kitchen has no kernel for it "
    "here)",
    "34 of 36 linears ComfyUI's W4A8 as in the file (bf16 was chosen), 2 ComfyUI's W6A8 as in the file",
    "ComfyUI's own INT8, as chosen",
    "bf16 was chosen. This MODEL cannot be saved as INT8: set kernel to 'fused int8' to save it.",
    "17 of 211 linears are protected, the most fragile on recorded inputs.",
    "the model runs on cpu, and INT8 tensor cores need a GPU. Set kernel to 'fused int8' on the node that made the "
    "model, to use INT8 all the same.",
    "saved INT8_00001_.safetensors, 7.7 MB",
    "saved a model, new_00001_.gguf, 11.9 GB",
    "model.gguf: blocks.0.proj: weight has a NaN or Inf in output channel 3; download or copy the file again",
    "quantizing layer 80 of 211",
    "reading layer 3 of 9, about 1 h 3 min left",
    "attention out: fused INT8 1.72 x bf16",
    "Mean error 0.61 % of the output (plain INT8: 1.20 %). 17 of 211 linears protected: 16 in INT8 with 16-bit "
    "activations, 1 in bf16. Calibrated rounding in 150 of 211 layers, mean error 0.52 % there on held-out inputs "
    "(rounded to nearest: 0.63 %). INT8 attention: mean error 1.10 %, exact in 3 of 34 blocks. 9.4 GB (was 18.6 GB).",
    "On this card INT8 is 1.72 × bf16; your image takes 0.58 of the time",
    "On this card INT8 is only 0.89 × bf16 in the linears",
    "INT8 was not timed beside bf16 here: no GPU",
    "Load INT8 here: 42 s for 20 steps, 11.2 GB of the card",
    "Load GGUF Q4_K as stored here: 31 s for 20 steps, 9.4 GB of the card",
    "What to load is predicted, for steps of two forwards, one of each model. Weights that do not fit in 6.2 GB of the "
    "card come over the bus in each step, at 12.3 GB/s here.",
    "What to load was not predicted",
    "The card is healthy: 65 bf16 TFLOPS, 92% of the card's peak of 71.",
    "The card is healthy: 65 bf16 TFLOPS.",
    "INVALID RUN. Its speed varies by 20% from one moment to the next. The card's speed changed by +21% during the "
    "run: leave it alone and measure again. Measured: 8 bf16 TFLOPS, 11% of the card's peak of 71.",
    "Nothing was stored, because this run does not count: auto stays as it was, decided by the run of 2026-11-28.",
    "Stored: auto now runs what was fastest here, of 5 shapes fused int8 for 3, bf16 for 2.",
    "fused int8 runs comfy-kitchen's GEMM, which gives the same and is faster here, at 4096 x 512 x 256, 77 x 3 x 9.",
    "fused int8 at 4096 x 512 x 256 computes something else: relative error 0.3.",
    "The rounds of bf16 differ by up to 12%: this machine was not steady, measure again.",
    r"\* not captured in a CUDA graph: a loop of calls, the host's launches included.",
    "Left out: ffn up (12288 x 4608 weights are too many for a CPU).",
    "Left out (not enough memory): INT8 of this pack; fused int8, GGUF Q4_K (4352 x 4608 x 512); cuDNN (18 heads of "
    "256, 4351 tokens).",
    "predicted, linears in fused int8",
    "predicted, whole blocks on the fused kernels",
    "one forward, as the model is",
    "attention, 18 heads of 256, 4352 tokens",
    "cross attention, 2 x 24 heads (8 of keys) of 128, 4096 x 512 tokens, masked",
    "Exact attention, 18 heads of 256, 4352 tokens: flash is the fastest, 1.10 x ComfyUI's choice.",
    "Exact attention, 18 heads of 256, 4352 tokens: PyTorch's choice is the fastest, 1.10 x ComfyUI's choice.",
    "x ComfyUI's choice",
    "1.72 x bf16",
    "linears",
    "the rest",
    "share",
    "s for 20 steps",
    "over the bus each step, GB",
    "W4A8 as stored",
    "0.6 % of the weight changes; 15.1 MB become 9.4 MB",
    "46.8 dB: most people see no difference",
    "PSNR: image and other differ within noise.",
    "SSIM: other is closer to the reference by 0.0042, more than noise.",
    "PSNR: image is closer to the reference in 30 of 36 pairs, more than noise.",
    "+0.12 to +0.45",
    r"Triton is not installed; in the folder D:\My files\portable run `.\python_embeded\python.exe -s -m pip install "
    '"triton-windows==3.7.*"`.',
    "Triton 3.8 is installed, but PyTorch 2.13 is built for Triton 3.7: torch.compile may fail; in the folder "
    r"C:\ComfyUI\venv\Scripts run `.\python.exe -m pip install "
    '"triton-windows==3.7.*"`.',
    "Triton cannot be imported (DLL load failed: libtriton.pyd); in the folder "
    '/home/me/venv/bin run `./python3 -m pip install --force-reinstall --no-deps "triton==3.7.*"`.',
    "a-00001-of-00002.gguf: part 1 of 2 of a split model; join all (GGUF: llama.cpp's `gguf-split --merge`) or use a "
    "single-file version",
    "Triton does not go with PyTorch",
    "INT8 layers compute in bf16",
    "The model runs unfused",
    "INT8 attention did not run",
    "a call of the model ran without it: no call reached it: the model, or another node's override, bypasses it.",
    "a call of the model ran without it: another attention is chosen; its shapes or options are unusual.",
    "a call of the model ran without it: it has a mask, which this comfy-kitchen does not take.",
    "a call of the model ran without it: a calibration keeps attention exact in its block; the model asks for more "
    "precision; it runs on cpu; its tensors are not all of float16, of bfloat16 or of float32.",
    "a call of the model ran without it: gradients are asked for; its heads are wider than 256; what PyTorch chooses "
    "is as fast.",
    "211 of 211 linears bf16 (measured to be the fastest on this RTX 3060, 2026-11-28), attention INT8 where it fits",
    "211 of 211 linears ComfyUI's INT8, attention INT8 (comfy-kitchen) where it fits",
    "Flux runs without the fusion between its linears, which is slower: its fused form does not do the same here.",
    "Flux runs without the fusion between its linears, which is slower: its fused form failed (ValueError: x: 3. y).",
)
OF_FILES = ("nodes/files/", "nodes/loading/")  # where errors get a file's name before them
UNKNOWN = "a/path, v1.2: what nobody translated (INT8)"
ENGLISH = r"\b[a-z]{2,}(?: [a-z]{2,}){2,}"  # three words after each other
TRANSLATE = """async texts => {
    const { translated } = await import("/extensions/int8_dit/translations.js");
    return texts.map(translated);
}"""


@pytest.mark.parametrize("tag", ("zh-CN", "ja-JP"))
def test_sentences_are_translated(browser, server, tag):
    with open_frontend(browser, server.url, locale=tag) as page:
        shown = page.evaluate(TRANSLATE, [*SENTENCES, UNKNOWN])
    assert shown.pop() == UNKNOWN
    for english, text in zip(SENTENCES, shown, strict=True):
        assert text != english and not re.search(ENGLISH, text)
        # Nothing that a run measured or named is lost.
        assert set(re.findall(r"\d+(?:\.\d+)?", english)) == set(re.findall(r"\d+(?:\.\d+)?", text))
        assert english.endswith(".") == text.endswith("。")


def test_a_remark_has_the_parentheses_of_its_language(browser, server):
    with open_frontend(browser, server.url, locale="fr-FR") as page:
        shown = page.evaluate(
            """async () => {
                const { loadTranslations, translated } = await import("/extensions/int8_dit/translations.js");
                const { api } = await import("/scripts/api.js");
                const fetch = api.fetchApi;
                api.fetchApi = async () => ({ json: async () => ({ fr: { int8_dit: { protected: "protégé" } } }) });
                await loadTranslations();
                api.fetchApi = fetch;
                return translated("fp32 (protected)");
            }"""
        )
    assert shown == "fp32 (protégé)"


@pytest.mark.parametrize("file", ("", "a model.v2.safetensors: "), ids=("alone", "behind a file's name"))
@pytest.mark.parametrize("tag", ("zh-CN", "ja-JP"))
def test_what_the_pack_raises_is_translated(browser, server, tag, file):
    raised = {place: text for place, text in raised_sentences().items() if not file or place.startswith(OF_FILES)}
    assert len(raised) > 100
    with open_frontend(browser, server.url, locale=tag) as page:
        shown = page.evaluate(TRANSLATE, [file + text for text in raised.values()])
    wrong = []
    for (place, english), text in zip(raised.items(), shown, strict=True):
        prose = re.sub("`.*?`", "", text)  # without commands
        lost = set(re.findall(r"v\d+", english)) - set(re.findall(r"v\d+", text))
        same = text.removeprefix(file) == english and re.search(r"[a-z]{3} [a-z]{2}", re.sub("`.*?`", "", english))
        if lost or same or re.search(ENGLISH, prose):
            wrong.append(f"{place}: {english} -> {text}")
    assert not wrong, "\n".join(wrong)


MODEL, SIZE = ("UNETLoader", {"unet_name": workflows.GLYPH_MODEL}), {"width": 96, "height": 64}
# By the node with details: a graph that makes it run here.
DETAILED = {
    "benchmark": ({"model": MODEL, "node": ("INT8KernelBenchmark", {"tokens": 16})}, [("model", 0, "node", "model")]),
    "quantize": (
        {"model": MODEL, "node": ("QuantizeToINT8SmoothQuant", {}), "shown": ("PreviewAny", {})},
        [("model", 0, "node", "model"), ("node", 2, "shown", "source")],
    ),
    "compare": (
        {
            "one": ("EmptyImage", SIZE | {"color": 1}),
            "two": ("EmptyImage", SIZE | {"color": 2}),
            "node": ("CompareImagesINT8DiT", {}),
        },
        [("one", 0, "node", "reference"), ("two", 0, "node", "image"), ("two", 0, "node", "other")],
    ),
}


@pytest.mark.parametrize("tag", ("zh-CN", "ja-JP"))
def test_details_are_translated(browser, server, tag):
    """Headings, columns and notes; names of layers and of others' code stay."""
    with open_frontend(browser, server.url, locale=tag) as page:
        for nodes, links in DETAILED.values():
            add_nodes(page, nodes, links)
            run(page, server)
            page.wait_for_selector(".int8-result .int8-headline")
            open_details(page)
            texts = page.evaluate(
                "() => [...document.querySelectorAll('.int8-details :is(h4, p, th, span)')].map((e) => e.textContent)"
            )
            assert len(texts) > 5
            words = {text for text in texts if re.search(r"(?<![\w.-])[a-z]{3,} [a-z]{2,}", re.sub("`.*?`", "", text))}
            heads = page.locator(".int8-details th").all_text_contents()
            assert not words and not {head for head in heads if re.search("[a-z]{4} |^[a-z]{3,}$", head)}
            page.evaluate("document.querySelector('.int8-details').remove()")


def test_english_stays(browser, server):
    with open_frontend(browser, server.url) as page:
        assert page.evaluate(TRANSLATE, [*SENTENCES]) == [*SENTENCES]
